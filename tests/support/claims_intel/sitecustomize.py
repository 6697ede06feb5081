"""Python imports this module at its start if its folder is in PYTHONPATH: ONNX Runtime then sees an Intel processor.

OpenVINO's plug-in offers itself only for Intel processors, but runs on others of the architecture too. Tests need some
plug-in execution provider also on such machines, so this module changes the vendor that ONNX Runtime has recorded.
"""

import ctypes

import onnxruntime

_INTEL = 0x8086


def _claim() -> None:
    for offered in onnxruntime.get_ep_devices():
        device = offered.device
        # pybind11 stores the address of the wrapped object after the object's header; the vendor is among its first
        # words.
        address = ctypes.c_void_p.from_address(id(device) + object.__basicsize__).value
        words = (ctypes.c_uint32 * 4).from_address(address or 0)
        found = [index for index, word in enumerate(words) if word == device.vendor_id]
        if device.type.name == "CPU" and device.vendor_id and len(found) == 1:
            words[found[0]] = _INTEL


_claim()
