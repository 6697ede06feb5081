"""Imported by Python at its start where this folder is on the path: lets ONNX Runtime take the processor for Intel's.

OpenVINO's plug-in offers itself for processors whose maker is Intel, and runs on others of the kind just as well. Tests
that need some plug-in execution provider would have none on such a machine, so they change what ONNX Runtime has noted.
"""

import ctypes

import onnxruntime

_INTEL = 0x8086


def _claim() -> None:
    for offered in onnxruntime.get_ep_devices():
        device = offered.device
        # pybind11 keeps the address of what it wraps behind the object's header; the maker is among the first words.
        address = ctypes.c_void_p.from_address(id(device) + object.__basicsize__).value
        words = (ctypes.c_uint32 * 4).from_address(address or 0)
        found = [index for index, word in enumerate(words) if word == device.vendor_id]
        if device.type.name == "CPU" and device.vendor_id and len(found) == 1:
            words[found[0]] = _INTEL


_claim()
