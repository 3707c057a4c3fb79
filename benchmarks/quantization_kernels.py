"""Which kernels run a quantized layer fastest on a CPU: ``python -m benchmarks.quantization_kernels``.

Eight of the 24 layers of Qwen2-0.5B (their matrices, without attention) and its output layer decode one token for 1
and for 8 rows, 100 … 400 MB of weights, so that they do not stay in the cache. Each way to store and multiply them is
timed in turn, and its error against float32 is kept. torchao, ONNX Runtime and OpenVINO are tried where they are
installed (``pip install torchao onnx onnxscript onnxruntime openvino nncf``); nothing in the package needs them.
Writes ``benchmarks/results/quantization_kernels.json``; what was not installed keeps its earlier line.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.metadata
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.harness import RESULTS, in_turn, markdown, save
from grpo_edu.quantization.layers import DynamicInt8Linear, Int4Linear, Int8Linear
from grpo_edu.quantization.numbers import quantize

COMMAND = "python -m benchmarks.quantization_kernels"
HIDDEN, NARROW, WIDE, VOCABULARY = 896, 128, 4864, 151_936
LAYERS, ROWS = 8, (1, 8)

Apply = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """The seven matrices of a Qwen2 layer, joined by as little as possible."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "q": (HIDDEN, HIDDEN),
            "k": (HIDDEN, NARROW),
            "v": (HIDDEN, NARROW),
            "o": (HIDDEN, HIDDEN),
            "gate": (HIDDEN, WIDE),
            "up": (HIDDEN, WIDE),
            "down": (WIDE, HIDDEN),
        }
        for name, (inputs, outputs) in sizes.items():
            setattr(self, name, nn.Linear(inputs, outputs, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.o(self.q(x)) + (self.k(x) * self.v(x)).sum(dim=-1, keepdim=True)
        return torch.tanh(x + mixed + self.down(self.gate(x) * self.up(x)))


class Stack(nn.Module):
    """`LAYERS` layers and the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Product(nn.Module):
    """A layer that calls a kernel."""

    def __init__(self, apply: Apply) -> None:
        super().__init__()
        self.apply_kernel = apply

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_kernel(x)


def with_products(stack: Stack, make: Callable[[Tensor], Apply]) -> Stack:
    """Return the stack with `make(weight)` in the place of each linear layer."""
    memo = {id(parameter): parameter for parameter in stack.parameters()}
    stack = copy.deepcopy(stack, memo)
    for module in list(stack.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Product(make(child.weight.detach())))
    return stack


# ---- kernels of torch itself ----


def float_activations_int8(weight: Tensor) -> Apply:
    """Return the kernel that the package uses, fed float32, for which it has no fast path."""
    parts = quantize(weight, dim=0)
    q, scale = parts.q, parts.scale.flatten()
    return lambda x: torch._weight_int8pack_mm(x, q, scale)


def dynamic_fbgemm(weight: Tensor) -> Apply:
    parts = quantize(weight, dim=0)
    scale = parts.scale.flatten().double()
    whole = torch._make_per_channel_quantized_tensor(parts.q, scale, torch.zeros(len(scale), dtype=torch.long), 0)
    packed = torch.ops.quantized.linear_prepack(whole, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, True)


def dynamic_int_mm(weight: Tensor) -> Apply:
    parts = quantize(weight, dim=0)
    q, scale = parts.q.t(), parts.scale.flatten()

    def apply(x: Tensor) -> Tensor:
        step = x.abs().amax(dim=-1, keepdim=True) / 127
        return torch._int_mm((x / step).round().to(torch.int8), q).float() * step * scale

    return apply


def packaged(kind: Callable[[nn.Linear], nn.Module]) -> Callable[[Stack], Apply]:
    """Return a function that puts the package's own layers into a stack."""

    def of(weight: Tensor) -> Apply:
        layer = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return kind(layer)

    return lambda stack: with_products(stack, of)


def compiled(stack: nn.Module) -> nn.Module:
    return torch.compile(stack, dynamic=False)


def dequantizing(weight: Tensor) -> Apply:
    """Return a product that a compiler can fuse: the integers are converted to floats, then multiplied."""
    parts = quantize(weight, dim=0)
    q, scale = parts.q, parts.scale.flatten()
    return lambda x: nn.functional.linear(x, q.to(x.dtype)) * scale


def torch_ao(stack: Stack) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(stack, {nn.Linear}, dtype=torch.qint8)


def in_bfloat16(stack: Stack) -> Apply:
    half = copy.deepcopy(stack).to(torch.bfloat16)
    return lambda x: half(x.to(torch.bfloat16)).float()


# ---- other libraries ----


def torchao_stack(name: str, *, compile_it: bool) -> Callable[[Stack], Apply]:
    def make(stack: Stack) -> Apply:
        from torchao import quantization as ao

        stack = copy.deepcopy(stack)
        ao.quantize_(stack, getattr(ao, name)())
        return compiled(stack) if compile_it else stack

    return make


def onnx_stack(run_with: str) -> Callable[[Stack], Apply]:
    """Exported to ONNX, quantized by ONNX Runtime, and run by it or by OpenVINO."""

    def make(stack: Stack) -> Apply:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        folder = Path(tempfile.mkdtemp(prefix="grpo-edu-onnx-"))
        plain, small = folder / "plain.onnx", folder / "int8.onnx"
        torch.onnx.export(
            stack, (torch.zeros(8, HIDDEN),), plain, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "rows"}}
        )
        quantize_dynamic(plain, small, weight_type=QuantType.QInt8, per_channel=True)
        plain.unlink()
        if run_with == "onnxruntime":
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            session = onnxruntime.InferenceSession(small, options, providers=["CPUExecutionProvider"])
            return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
        return _openvino(small)

    return make


def openvino_stack(stack: Stack) -> Apply:
    """Converted from torch, int8 weights by NNCF, activations quantized on the fly by the CPU plugin."""
    import nncf
    import openvino

    model = openvino.convert_model(copy.deepcopy(stack), example_input=torch.zeros(8, HIDDEN))
    return _openvino(nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM))


def _openvino(model) -> Apply:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    ready = openvino.Core().compile_model(model, "CPU", settings)
    return lambda x: torch.from_numpy(ready(x.numpy())[0])


# name → (library, what it needs installed, how to make it)
WAYS: dict[str, tuple[str, tuple[str, ...], Callable[[Stack], Apply]]] = {
    "float32": ("torch", (), lambda stack: stack),
    "bfloat16": ("torch", (), in_bfloat16),
    "int8-dynamic of this package (oneDNN)": ("torch", (), packaged(DynamicInt8Linear)),
    "int8-weight of this package (_weight_int8pack_mm)": ("torch", (), packaged(Int8Linear.of)),
    "int4-group of this package (_weight_int4pack_mm)": ("torch", (), packaged(Int4Linear)),
    "int8 dynamic, fbgemm": ("torch", (), lambda stack: with_products(stack, dynamic_fbgemm)),
    "int8 dynamic, _int_mm": ("torch", (), lambda stack: with_products(stack, dynamic_int_mm)),
    "int8 dynamic, torch.ao": ("torch.ao", (), torch_ao),
    "int8 weight, _weight_int8pack_mm in float32": (
        "torch",
        (),
        lambda stack: with_products(stack, float_activations_int8),
    ),
    "int8 weight, torch.compile": ("torch.compile", (), lambda stack: compiled(with_products(stack, dequantizing))),
    "int8 dynamic, torchao": (
        "torchao",
        ("torchao",),
        torchao_stack("Int8DynamicActivationInt8WeightConfig", compile_it=False),
    ),
    "int8 dynamic, torchao compiled": (
        "torchao",
        ("torchao",),
        torchao_stack("Int8DynamicActivationInt8WeightConfig", compile_it=True),
    ),
    "int8 weight, torchao": ("torchao", ("torchao",), torchao_stack("Int8WeightOnlyConfig", compile_it=False)),
    "int8 dynamic, ONNX Runtime": ("onnxruntime", ("onnx", "onnxruntime"), onnx_stack("onnxruntime")),
    "int8 dynamic, ONNX Runtime's file in OpenVINO": (
        "openvino",
        ("onnx", "onnxruntime", "openvino"),
        onnx_stack("openvino"),
    ),
    "int8 weight, OpenVINO": ("openvino", ("openvino", "nncf"), openvino_stack),
}


def installed(names: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


def version(library: str) -> str:
    return (
        torch.__version__
        if library.startswith("torch") and library != "torchao"
        else importlib.metadata.version(library)
    )


def measure(name: str, stack: Stack, truth: dict[int, Tensor], inputs: dict[int, Tensor], rounds: int) -> dict:
    """Milliseconds of each number of rows, taken in turn with float32, and the error of one way."""
    library, _, make = WAYS[name]
    try:
        way = make(stack)
        with torch.no_grad():
            errors = {rows: ((way(inputs[rows]) - truth[rows]).norm() / truth[rows].norm()).item() for rows in ROWS}
            line = {"library": f"{library} {version(library)}", "error": round(max(errors.values()), 5)}
            for rows in ROWS:
                x = inputs[rows]
                seconds = in_turn({"float32": lambda x=x: stack(x), name: lambda x=x: way(x)}, rounds)
                line[f"ms at {rows}"] = round(1000 * statistics.median(seconds[name]), 2)
                speed = [slow / fast for slow, fast in zip(seconds["float32"], seconds[name], strict=True)]
                line[f"times float32 at {rows}"] = round(statistics.median(speed), 2)
    except (RuntimeError, NotImplementedError, ImportError, AttributeError) as error:
        return {"library": library, "failed": str(error).strip().splitlines()[0][:200]}
    return line


def main() -> int:
    """Measure what is installed."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(WAYS), metavar="WAY", help="some of the ways")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS / "quantization_kernels.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    stack = Stack().eval()
    inputs = {rows: torch.randn(rows, HIDDEN) for rows in ROWS}
    with torch.no_grad():
        truth = {rows: stack(x) for rows, x in inputs.items()}
    warnings.filterwarnings("ignore")  # of what the libraries say on their deprecated parts
    earlier = json.loads(options.output.read_text(encoding="utf-8"))["ways"] if options.output.exists() else {}
    found = dict(earlier)
    for name in options.only or WAYS:
        if installed(WAYS[name][1]):
            found[name] = measure(name, stack, truth, inputs, options.rounds)
            print(name, found[name], flush=True)
        else:
            found.setdefault(name, {"library": WAYS[name][0], "failed": "not installed"})
    save(options.output, COMMAND, {"layers": LAYERS, "ways": {name: found[name] for name in WAYS if name in found}})
    done = [{"way": name, **line} for name, line in found.items() if "failed" not in line]
    print("\n" + markdown(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
