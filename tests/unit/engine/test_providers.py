"""The choice of execution providers: configured preferences against the available providers."""

from collections.abc import Callable

import onnxruntime as ort
import pytest

from ortserve.config.session import ProviderWish
from ortserve.engine.provider_options import CPU
from ortserve.engine.providers import (
    Provider,
    ProviderChoice,
    attach_providers,
    check_names,
    check_providers,
    choose_provider,
)
from ortserve.engine.runtime import Offer
from ortserve.errors import ErrorKind, ServeError

CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
ROCM = "ROCMExecutionProvider"
CUDA_DEFAULTS = {"cudnn_conv_algo_search": "HEURISTIC", "arena_extend_strategy": "kSameAsRequested"}


def offering(*names: str) -> Callable[[str], Offer]:
    """A build of ONNX Runtime with these providers."""

    def offer(name: str) -> Offer:
        return Offer() if name in names else Offer(problem="is not offered by this ONNX Runtime")

    return offer


def choice_of(*wishes: ProviderWish) -> ProviderChoice:
    return choose_provider(wishes, offering(TENSORRT, CUDA, ROCM, CPU))


def numbers(choice: ProviderChoice) -> list[int]:
    """The device numbers of the chosen provider and of its fallbacks."""
    return [choice.device_id, *(other.device_id for other in choice.behind)]


def attached(choice: ProviderChoice, *, has_cpu: bool = True) -> list[tuple[str, dict[str, str]]] | None:
    return attach_providers(ort.SessionOptions(), choice, threads=1, has_cpu=has_cpu)


@pytest.mark.parametrize(
    ("wishes", "offered", "chosen", "passed_over"),
    [
        (["cpu"], [CPU], CPU, []),
        (["cpu"], [CUDA, CPU], CPU, []),
        (["CUDA", "cpu"], [CUDA, CPU], CUDA, []),
        ([CUDA], [CUDA, CPU], CUDA, []),
        (["tensorrt", "cuda", "cpu"], [CPU], CPU, [TENSORRT, CUDA]),
        (["MyOwnExecutionProvider", "cpu"], ["MyOwnExecutionProvider", CPU], "MyOwnExecutionProvider", []),
    ],
)
def test_first_available_choice_is_used(
    wishes: list[str], offered: list[str], chosen: str, passed_over: list[str]
) -> None:
    choice = choose_provider(wishes, offering(*offered))
    assert choice.name == chosen
    assert choice.passed_over == tuple(f"{name} is not offered by this ONNX Runtime" for name in passed_over)


def test_unavailable_wishes_are_an_error_that_names_wishes_reasons_and_offer() -> None:
    with pytest.raises(ServeError) as caught:
        choose_provider(["tensorrt", "gpu"], offering(CUDA, CPU))
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message.startswith(
        "execution_providers (instance_group.kind in a config.pbtxt): none of tensorrt, gpu can be used: "
        "TensorrtExecutionProvider is not offered by this ONNX "
        "Runtime; gpu is not offered by this ONNX Runtime (expected cpu, cuda, tensorrt, openvino or a full name); "
        "this ONNX Runtime offers "
    )
    assert CPU in caught.value.message


def test_error_on_a_machine_without_the_gpu_package_names_it() -> None:
    if CUDA in ort.get_available_providers():
        pytest.skip("ONNX Runtime's package for GPUs is installed")
    with pytest.raises(ServeError, match=r"; for NVIDIA GPUs: .* pip install 'ortserve\[gpu\]'$"):
        choose_provider(["tensorrt", "cuda"])
    with pytest.raises(ServeError) as caught:
        choose_provider(["openvino"])
    assert "NVIDIA" not in caught.value.message


def test_installed_onnx_runtime_offers_the_cpu() -> None:
    assert choose_provider(["no_such", "cpu"]).name == CPU


def test_cpu_follows_every_provider_unless_forbidden() -> None:
    assert attached(ProviderChoice(CUDA)) == [(CUDA, {}), (CPU, {})]
    assert attached(ProviderChoice(CUDA), has_cpu=False) == [(CUDA, {})]
    assert attached(ProviderChoice(CPU)) == [(CPU, {})]
    assert attached(ProviderChoice(CPU), has_cpu=False) == [(CPU, {})]


def test_provider_that_onnx_runtime_dropped_is_an_error() -> None:
    check_providers(ProviderChoice(CUDA), [CUDA, CPU])
    with pytest.raises(ServeError, match=f"{CUDA} was chosen, but ONNX Runtime could not start it and uses {CPU}"):
        check_providers(ProviderChoice(CUDA), [CPU])


def test_tensorrt_graph_option_belongs_to_that_provider() -> None:
    wishes: list[ProviderWish] = [{"tensorrt": {"trt_cuda_graph_enable": True}}, "cuda", "cpu"]
    choice = choose_provider(wishes, offering(TENSORRT, CUDA, CPU))
    assert choice.wants_graphs
    options = attached(choice) or []
    assert options[0] == (TENSORRT, {}), "only a session that captures gets the option"
    assert not choice.without_first("it fails").wants_graphs
    assert not choose_provider(wishes, offering(CUDA, CPU)).wants_graphs
    behind = choose_provider(["cuda", *wishes], offering(TENSORRT, CUDA, CPU))
    assert not behind.wants_graphs
    assert (TENSORRT, {}) in (attached(behind) or [])
    assert not choose_provider([{"tensorrt": {"trt_cuda_graph_enable": "0"}}], offering(TENSORRT)).wants_graphs


def test_options_of_a_choice_reach_only_its_provider() -> None:
    wishes: list[ProviderWish] = [
        {"tensorrt": {"trt_fp16_enable": True, "device_id": 1}},
        {"cuda": {"device_id": 1}},
        "openvino",
        "cpu",
    ]
    choice = choose_provider(wishes, offering(TENSORRT, CUDA, CPU))
    assert (choice.name, choice.device_id, choice.passed_over) == (TENSORRT, 1, ())
    assert attached(choice) == [
        (TENSORRT, {"trt_fp16_enable": "true", "device_id": "1"}),
        (CUDA, CUDA_DEFAULTS | {"device_id": "1"}),
        (CPU, {}),
    ]


def test_no_provider_is_attached_behind_the_cpu_or_ahead_of_the_choice() -> None:
    choice = choose_provider(["openvino", "cpu", "cuda"], offering(CUDA, CPU))
    assert attached(choice) == [(CPU, {})]
    assert choice.passed_over == ("OpenVINOExecutionProvider is not offered by this ONNX Runtime",)


def test_wrong_option_of_any_provider_is_named_even_if_the_provider_is_missing() -> None:
    with pytest.raises(ServeError, match="CUDAExecutionProvider: device_id: expected integer, 0 to 1023, got 'first'"):
        choose_provider(["cpu", {"cuda": {"device_id": "first"}}], offering(CPU))


def test_device_of_an_unknown_provider_is_unchecked() -> None:
    assert choose_provider([{"Other": {"device_id": "first"}}], offering("Other")).device_id == 0


BOTH = ProviderChoice(
    TENSORRT, passed_over=("x is missing",), behind=(Provider(CUDA, {"device_id": "1"}), Provider(CPU))
)


def test_choice_without_its_first_provider_uses_the_next() -> None:
    assert BOTH.without_first(f"{TENSORRT} fails") == ProviderChoice(
        CUDA, {"device_id": "1"}, passed_over=("x is missing", f"{TENSORRT} fails"), behind=(Provider(CPU),)
    )


def test_choice_moves_to_a_device_with_its_fallbacks() -> None:
    choice = ProviderChoice(
        TENSORRT, options={"device_id": "0"}, behind=(Provider(CUDA, {"use_tf32": "0"}), Provider(CPU))
    )
    moved = choice.on_device(3)
    assert (moved.name, moved.device_id) == (TENSORRT, 3)
    assert [other.options for other in moved.behind] == [{"use_tf32": "0", "device_id": "3"}, {}]
    assert choice.device_id == 0


def test_gpu_provider_shares_the_gpu_of_its_predecessor() -> None:
    wishes: list[ProviderWish] = [{"tensorrt": {"device_id": 1}}, {"cuda": {"use_tf32": False}}, "cpu"]
    choice = choose_provider(wishes, offering(TENSORRT, CUDA, CPU))
    assert attached(choice) == [
        (TENSORRT, {"device_id": "1"}),
        (CUDA, CUDA_DEFAULTS | {"use_tf32": "0", "device_id": "1"}),
        (CPU, {}),
    ]
    assert numbers(choice) == [1, 1, 0]
    moved = choice.on_device(3)
    assert numbers(moved) == [3, 3, 0]
    assert moved.without_first("it fails").device_id == 3


def test_gpu_provider_after_a_non_gpu_provider_selects_its_gpu() -> None:
    wishes: list[ProviderWish] = ["MyOwnExecutionProvider", {"tensorrt": {"device_id": 2}}, "cuda"]
    choice = choose_provider(wishes, offering("MyOwnExecutionProvider", TENSORRT, CUDA))
    assert numbers(choice) == [0, 2, 2]
    assert attached(choice_of("cuda", "cpu")) == [(CUDA, CUDA_DEFAULTS), (CPU, {})]


def test_provider_that_replaces_its_predecessor_selects_its_gpu() -> None:
    choice = choice_of({"tensorrt": {"device_id": 1}}, "cuda", ROCM, "cpu")
    assert numbers(choice) == [1, 1, 1, 0]
    instead = choice.without_first("it fails")
    assert (instead.name, instead.options) == (CUDA, CUDA_DEFAULTS)
    assert [other.options for other in instead.behind] == [{}, {}]
    given = choice_of({"tensorrt": {"device_id": 1}}, {"cuda": {"device_id": 1}}, ROCM).without_first("it fails")
    assert numbers(given) == [1, 1]


@pytest.mark.parametrize("offered", [(TENSORRT, CUDA, CPU), (CUDA, CPU), (CPU,)])
@pytest.mark.parametrize(
    ("ahead", "number"), [({"tensorrt": {"device_id": 1}}, 1), ("tensorrt", 0), ({"tensorrt": {"device_id": 3}}, 3)]
)
def test_another_gpu_than_that_of_the_provider_ahead_is_rejected_even_if_unavailable(
    ahead: ProviderWish, number: int, offered: tuple[str, ...]
) -> None:
    with pytest.raises(ServeError) as caught:
        choose_provider([ahead, {"cuda": {"device_id": 2}}, "cpu"], offering(*offered))
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == (
        f"execution_providers: {CUDA}: device_id: expected {number}, the GPU of {TENSORRT} before it, got 2"
    )


def test_same_provider_on_another_gpu_is_a_fallback() -> None:
    choice = choice_of({"cuda": {"device_id": 0}}, {"cuda": {"device_id": 1}}, "cpu")
    assert attached(choice) == [(CUDA, CUDA_DEFAULTS | {"device_id": "0"}), (CPU, {})]
    assert choice.without_first("it fails").device_id == 1


def test_known_names_are_those_of_onnx_runtime_and_of_plug_ins_available_or_not() -> None:
    check_names(["cpu", "CUDA", {"tensorrt": {"device_id": 1}}, "openvino", "QNNExecutionProvider"], "--provider")
    check_names(["OpenVINOExecutionProvider.AUTO"], "--provider")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cdua", "; did you mean 'cuda'?"),
        ("CUDAExecutionProvder", "; did you mean 'CUDAExecutionProvider'?"),
        ("x", ""),
    ],
)
def test_unknown_name_is_refused_with_known_ones(name: str, hint: str) -> None:
    with pytest.raises(ServeError) as caught:
        check_names(["cpu", name], "--provider")
    expected = "--provider: expected cpu, cuda, tensorrt, openvino or a full name such as "
    assert caught.value.message.startswith(expected)
    assert caught.value.message.endswith(f", got '{name}'{hint}")
