"""A wish list against an offer."""

import pytest

from ortserve.config.session import ProviderWish
from ortserve.engine.providers import CPU, ProviderChoice, check_providers, choose_provider, session_providers
from ortserve.errors import ErrorKind, ServeError

CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"


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
def test_first_wish_that_is_offered_is_chosen(
    wishes: list[str], offered: list[str], chosen: str, passed_over: list[str]
) -> None:
    choice = choose_provider(wishes, offered)
    assert choice.name == chosen
    assert choice.passed_over == tuple(f"{name} is not offered by this ONNX Runtime" for name in passed_over)


def test_wishes_that_nothing_meets_are_an_error_that_names_wishes_and_offer() -> None:
    with pytest.raises(ServeError) as caught:
        choose_provider(["tensorrt", "gpu"], [CUDA, CPU])
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == (
        "execution_providers: none of tensorrt, gpu can be used; "
        "this ONNX Runtime offers CUDAExecutionProvider, CPUExecutionProvider"
    )


def test_installed_onnx_runtime_is_asked_and_offers_the_cpu() -> None:
    assert choose_provider(["no_such", "cpu"]).name == CPU


def test_cpu_stands_behind_every_other_provider() -> None:
    assert session_providers(ProviderChoice(CUDA)) == [(CUDA, {}), (CPU, {})]
    assert session_providers(ProviderChoice(CPU)) == [(CPU, {})]


def test_provider_that_onnx_runtime_dropped_is_an_error() -> None:
    check_providers(ProviderChoice(CUDA), [CUDA, CPU])
    with pytest.raises(ServeError, match=f"{CUDA} was chosen, but ONNX Runtime could not start it and uses {CPU}"):
        check_providers(ProviderChoice(CUDA), [CPU])


def test_wish_may_bring_options_which_go_to_its_own_provider_only() -> None:
    wishes: list[ProviderWish] = [
        {"tensorrt": {"trt_fp16_enable": True, "device_id": 1}},
        {"cuda": {"device_id": 1}},
        "openvino",
        "cpu",
    ]
    choice = choose_provider(wishes, [TENSORRT, CUDA, CPU])
    assert (choice.name, choice.device_id, choice.passed_over) == (TENSORRT, 1, ())
    assert session_providers(choice) == [
        (TENSORRT, {"trt_fp16_enable": "1", "device_id": "1"}),
        (CUDA, {"device_id": "1"}),
        (CPU, {}),
    ]


def test_nothing_stands_behind_the_cpu_and_nothing_ahead_of_the_choice_beside_it() -> None:
    choice = choose_provider(["openvino", {"cpu": {"a": "b"}}, "cuda"], [CUDA, CPU])
    assert session_providers(choice) == [(CPU, {"a": "b"})]
    assert choice.passed_over == ("OpenVINOExecutionProvider is not offered by this ONNX Runtime",)


def test_unreadable_device_is_left_to_the_provider_to_refuse() -> None:
    assert choose_provider([{"cuda": {"device_id": "first"}}], [CUDA]).device_id == 0
