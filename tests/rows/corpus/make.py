"""Exports the models of this folder with real exporters, in a separate environment: see ``README.md``.

``python make.py [name ...]`` writes the models and ``manifest.json``, which contains the exporter of each and the
shapes of a request of one row. Weights are random, so that files stay small; the exporters' graphs around them matter.
"""
# mypy: ignore-errors

import json
import math
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

FOLDER = Path(__file__).parent
MAX_BYTES = 200_000
MODELS = {}

warnings.filterwarnings("ignore")
torch.manual_seed(0)


def model(shapes, *, below=None, independent=True, axes=None):
    """Register a function that writes a model to a path and returns its exporter.

    ``shapes`` are the shapes of a request of one row; ``axes`` are the axes of rows, if not axis 0 of all inputs.
    """

    def register(write):
        MODELS[write.__name__] = (write, shapes, below or {}, independent, axes)
        return write

    return register


def script(module, example, path, inputs, outputs, axes, opset=17):
    """Export with torch's older exporter, which traces."""
    torch.onnx.export(
        module.eval(), example, str(path), input_names=inputs, output_names=outputs, dynamic_axes=axes,
        opset_version=opset, dynamo=False,
    )  # fmt: skip
    return f"torch {torch.__version__}, TorchScript"


def dynamo(module, example, path, inputs, outputs, shapes):
    """Export with torch's newer exporter."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "model.onnx"
        torch.onnx.export(
            module.eval(), example, str(whole), input_names=inputs, output_names=outputs, dynamic_shapes=shapes,
            dynamo=True, external_data=False, verbose=False,
        )  # fmt: skip
        made = onnx.load(whole)
    for node in made.graph.node:  # removes the metadata about a node's place in the source
        del node.metadata_props[:]
    del made.graph.value_info[:]
    onnx.save(made, path)
    return f"torch {torch.__version__}, dynamo, onnxscript {version('onnxscript')}"


N = torch.export.Dim("batch", min=1, max=1024)
S = torch.export.Dim("length", min=2, max=128)


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 3), nn.Softmax(-1))


class Cnn(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, groups=8), nn.Hardswish(), nn.Conv2d(8, 4, 1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
        )  # fmt: skip


class Encoder(nn.Module):
    """Tokens with learned positions and a mask."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.positions = nn.Embedding(64, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids, mask):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.layers(x, src_key_padding_mask=mask == 0)
        m = mask.unsqueeze(-1).to(x.dtype)
        return (x * m).sum(1) / m.sum(1).clamp(min=1e-6)


class Attention(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, past_k=None, past_v=None, causal=False):
        n, s, w = x.shape
        q, k, v = self.qkv(x).view(n, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        if past_k is not None:
            k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(w // self.heads)
        if causal:
            total = k.shape[2]
            mask = torch.tril(torch.ones(total, total, dtype=torch.bool))[total - s :]
            scores = scores.masked_fill(~mask, -1e9)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, s, w)
        return self.out(y), k, v


class Decoder(nn.Module):
    """A step of a decoder with a past."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.positions = nn.Embedding(64, 16)
        self.attention = Attention()
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 20)

    def forward(self, ids, past_k, past_v):
        past = past_k.shape[2]
        x = self.tokens(ids) + self.positions(torch.arange(past, past + ids.shape[1]))
        y, k, v = self.attention(self.norm(x), past_k, past_v, causal=True)
        return self.head(x + y), k, v


class TextTower(nn.Module):
    """The state at the token with the highest number, as in CLIP."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.attention = Attention()

    def forward(self, ids):
        x = self.attention(self.tokens(ids), causal=True)[0]
        x = x[torch.arange(x.shape[0]), ids.argmax(-1)]
        return x / x.norm(dim=-1, keepdim=True)


class Windows(nn.Module):
    """Attention within windows of an image, as in Swin."""

    def __init__(self):
        super().__init__()
        self.attention = Attention(8)

    def forward(self, x):
        n, c, h, w = x.shape
        x = x.permute(0, 2, 3, 1).reshape(n, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(-1, 16, c)
        x = self.attention(x)[0].view(n, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(n, h, w, c).permute(0, 3, 1, 2)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.mid, self.up = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 1, 1)
        self.norm = nn.GroupNorm(2, 4)
        self.trans = nn.ConvTranspose2d(4, 4, 2, 2)

    def forward(self, x):
        a = torch.relu(self.norm(self.down(x)))
        b = torch.relu(self.mid(nn.functional.max_pool2d(a, 2)))
        b = nn.functional.interpolate(self.trans(nn.functional.avg_pool2d(b, 2)), scale_factor=2.0, mode="bilinear")
        return self.up(torch.cat([a, b], 1))


class Crnn(nn.Module):
    """Recognizes a line of text: rows on axis 0 of the image, and on axis 1 of the result."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, stride=(4, 2), padding=1)
        self.lstm = nn.LSTM(12, 8, bidirectional=True)
        self.head = nn.Linear(16, 7)

    def forward(self, x):
        x = torch.relu(self.conv(x)).permute(3, 0, 1, 2).flatten(2)
        return self.head(self.lstm(x)[0]).log_softmax(-1)


class Voice(nn.Module):
    """A recurrent step with state inputs and outputs on axis 1."""

    def __init__(self):
        super().__init__()
        self.conv, self.lstm, self.head = nn.Conv1d(1, 8, 8, 8), nn.LSTM(8, 8, 2), nn.Linear(8, 1)

    def forward(self, audio, h, c):
        x = torch.relu(self.conv(audio.unsqueeze(1))).permute(2, 0, 1)
        x, (h, c) = self.lstm(x, (h, c))
        return torch.sigmoid(self.head(x[-1])), h, c


class Experts(nn.Module):
    """Each row passes through the two of its experts with the highest scores."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        y = torch.einsum("bi,beio->beo", x, self.experts[chosen])
        return (weights.unsqueeze(-1) * y).sum(1)


class Images(nn.Module):
    """Compares images with texts: each row depends on all others."""

    def forward(self, images, texts):
        a = images / images.norm(dim=-1, keepdim=True)
        b = texts / texts.norm(dim=-1, keepdim=True)
        return (a @ b.t()).softmax(-1)


class Greedy(nn.Module):
    """Emits tokens until all rows have emitted the last one."""

    def __init__(self):
        super().__init__()
        self.cell, self.head, self.tokens = nn.Linear(12, 6), nn.Linear(6, 5), nn.Embedding(5, 6)

    def forward(self, x):
        token = torch.zeros(x.shape[0], dtype=torch.long)
        done = token != 0
        count = torch.zeros(x.shape[0], dtype=torch.long)
        going, step = torch.tensor(True), 0
        while bool(going) and step < 12:
            x = torch.tanh(self.cell(torch.cat([self.tokens(token), x], 1)))
            token = self.head(x).argmax(-1)
            count = count + 1
            done = done | (token == 4)
            going = ~done.all()
            step += 1
        return count


class Pair(nn.Module):
    """Compares two vectors, which it encodes as one batch."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 4)

    def forward(self, a, b):
        a, b = self.encoder(torch.cat([a, b])).chunk(2)
        return nn.functional.cosine_similarity(a, b)


class MaskedFrames(nn.Module):
    """Sets padded frames to 0, as speech encoders do."""

    def __init__(self):
        super().__init__()
        self.frames = nn.Linear(4, 8)

    def forward(self, x, mask):
        h = self.frames(x)
        h[~mask.bool()] = 0
        return h.mean(1)


class CentredFrames(nn.Module):
    """Subtracts from the frames the mean of those of all rows."""

    def forward(self, x, mask):
        x = x.clone()
        x[~mask.bool()] = x[mask.bool()].mean()
        return x.mean(1)


class Centred(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-5)


class Standardized(nn.Module):
    def forward(self, x):
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)


class Packed(nn.Module):
    """Lengths of sequences, and a mask computed from them."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 6, batch_first=True, bidirectional=True)

    def forward(self, x, lengths):
        mask = torch.arange(x.shape[1])[None, :] < lengths[:, None]
        y, _ = self.gru(x * mask.unsqueeze(-1))
        return y.masked_fill(~mask.unsqueeze(-1), -1e4).max(1).values


# torch, TorchScript.


@model({"x": [1, 8]})
def torch_mlp(path):
    return script(Mlp(), torch.randn(2, 8), path, ["x"], ["y"], {"x": {0: "batch"}, "y": {0: "batch"}})


@model({"x": [1, 3, 16, 16]})
def torch_cnn(path):
    return script(Cnn(), torch.randn(2, 3, 16, 16), path, ["x"], ["y"], {"x": {0: "batch"}, "y": {0: "batch"}})


@model({"x": [1, 3, 12, 16]})
def torch_cnn_of_any_size(path):
    axes = {"x": {0: "batch", 2: "height", 3: "width"}, "y": {0: "batch"}}
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    return script(net, torch.randn(2, 3, 16, 16), path, ["x"], ["y"], axes, opset=13)


@model({"ids": [1, 6], "mask": [1, 6]}, below={"ids": 20, "mask": 2})
def torch_encoder(path):
    axes = {"ids": {0: "batch", 1: "length"}, "mask": {0: "batch", 1: "length"}, "y": {0: "batch"}}
    example = torch.ones(2, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.long)
    return script(Encoder(), example, path, ["ids", "mask"], ["y"], axes)


@model({"ids": [1, 2], "past_k": [1, 2, 3, 8], "past_v": [1, 2, 3, 8]}, below={"ids": 20})
def torch_decoder_with_past(path):
    past = {0: "batch", 2: "past"}
    axes = {"ids": {0: "batch", 1: "length"}, "past_k": past, "past_v": past, "logits": {0: "batch", 1: "length"}}
    axes |= {name: {0: "batch", 2: "past + length"} for name in ("k", "v")}
    example = torch.ones(2, 2, dtype=torch.long), torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    return script(Decoder(), example, path, ["ids", "past_k", "past_v"], ["logits", "k", "v"], axes)


@model({"ids": [1, 7]}, below={"ids": 50})
def torch_text_tower(path):
    return script(TextTower(), torch.ones(2, 7, dtype=torch.long), path, ["ids"], ["y"], {"ids": {0: "batch", 1: "n"}})


@model({"x": [1, 8, 8, 8]})
def torch_windows(path):
    return script(Windows(), torch.randn(2, 8, 8, 8), path, ["x"], ["y"], {"x": {0: "batch", 2: "h", 3: "w"}})


@model({"x": [1, 1, 16, 16]})
def torch_unet(path):
    return script(UNet(), torch.randn(2, 1, 16, 16), path, ["x"], ["y"], {"x": {0: "batch"}, "y": {0: "batch"}})


@model({"x": [1, 1, 8, 20]})
def torch_crnn(path):
    return script(Crnn(), torch.randn(2, 1, 8, 20), path, ["x"], ["y"], {"x": {0: "batch", 3: "width"}})


@model({"audio": [1, 64], "h": [2, 1, 8], "c": [2, 1, 8]}, axes={"audio": 0, "h": 1, "c": 1})
def torch_voice_activity(path):
    axes = {"audio": {0: "batch"}, "h": {1: "batch"}, "c": {1: "batch"}}
    example = torch.randn(3, 64), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    return script(Voice(), example, path, ["audio", "h", "c"], ["p", "hn", "cn"], axes)


@model({"x": [5, 1, 4]}, axes={"x": 1})
def torch_lstm_time_first(path):
    class Net(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    return script(Net(4, 6), torch.randn(5, 2, 4), path, ["x"], ["y"], {"x": {0: "time", 1: "batch"}})


@model({"x": [1, 5, 4], "lengths": [1]}, below={"lengths": 5})
def torch_gru_with_lengths(path):
    example = torch.randn(2, 5, 4), torch.tensor([3, 5])
    axes = {"x": {0: "batch", 1: "time"}, "lengths": {0: "batch"}}
    return script(Packed(), example, path, ["x", "lengths"], ["y"], axes)


@model({"x": [1, 8]})
def torch_experts(path):
    return script(Experts(), torch.randn(3, 8), path, ["x"], ["y"], {"x": {0: "batch"}})


@model({"x": [1, 9]})
def torch_standardized_rows(path):
    return script(Standardized(), torch.randn(3, 9), path, ["x"], ["y"], {"x": {0: "batch"}})


@model({"a": [1, 6], "b": [1, 6]})
def torch_pair(path):
    return script(
        Pair(), (torch.randn(3, 6), torch.randn(3, 6)), path, ["a", "b"], ["y"], {"a": {0: "n"}, "b": {0: "n"}}
    )


@model({"images": [1, 6], "texts": [1, 6]}, independent=False)
def torch_images_and_texts(path):
    axes = {"images": {0: "batch"}, "texts": {0: "batch"}}
    return script(Images(), (torch.randn(2, 6), torch.randn(2, 6)), path, ["images", "texts"], ["y"], axes)


@model({"x": [1, 6]}, independent=False)
def torch_centred_batch(path):
    return script(Centred(), torch.randn(3, 6), path, ["x"], ["y"], {"x": {0: "batch"}})


@model({"x": [1, 3, 5]}, independent=False)
def torch_batch_norm_in_training(path):
    torch.onnx.export(
        nn.BatchNorm1d(3).train(), torch.randn(4, 3, 5), str(path), input_names=["x"], output_names=["y"],
        dynamic_axes={"x": {0: "batch"}}, opset_version=17, training=torch.onnx.TrainingMode.TRAINING, dynamo=False,
    )  # fmt: skip
    return f"torch {torch.__version__}, TorchScript"


@model({"x": [1, 6]}, independent=False)
def torch_greedy_decoder(path):
    torch.manual_seed(37)  # rows end after different numbers of tokens
    return script(torch.jit.script(Greedy()), torch.randn(3, 6), path, ["x"], ["y"], {"x": {0: "batch"}})


# torch, dynamo.


@model({"x": [1, 8]})
def dynamo_mlp(path):
    return dynamo(Mlp(), (torch.randn(3, 8),), path, ["x"], ["y"], ({0: N},))


@model({"x": [1, 3, 16, 16]})
def dynamo_cnn(path):
    return dynamo(Cnn(), (torch.randn(3, 3, 16, 16),), path, ["x"], ["y"], ({0: N},))


@model({"ids": [1, 6], "mask": [1, 6]}, below={"ids": 20, "mask": 2})
def dynamo_encoder(path):
    example = torch.ones(3, 6, dtype=torch.long), torch.ones(3, 6, dtype=torch.long)
    return dynamo(Encoder(), example, path, ["ids", "mask"], ["y"], ({0: N, 1: S}, {0: N, 1: S}))


@model({"ids": [1, 2], "past_k": [1, 2, 3, 8], "past_v": [1, 2, 3, 8]}, below={"ids": 20})
def dynamo_decoder_with_past(path):
    past = torch.export.Dim("past", min=1, max=60)
    example = torch.ones(3, 2, dtype=torch.long), torch.randn(3, 2, 3, 8), torch.randn(3, 2, 3, 8)
    shapes = ({0: N}, {0: N, 2: past}, {0: N, 2: past})
    return dynamo(Decoder(), example, path, ["ids", "past_k", "past_v"], ["logits", "k", "v"], shapes)


@model({"ids": [1, 7]}, below={"ids": 50})
def dynamo_text_tower(path):
    return dynamo(TextTower(), (torch.ones(3, 7, dtype=torch.long),), path, ["ids"], ["y"], ({0: N, 1: S},))


@model({"x": [1, 8, 8, 8]})
def dynamo_windows(path):
    return dynamo(Windows(), (torch.randn(3, 8, 8, 8),), path, ["x"], ["y"], ({0: N},))


@model({"x": [1, 1, 16, 16]})
def dynamo_unet(path):
    return dynamo(UNet(), (torch.randn(3, 1, 16, 16),), path, ["x"], ["y"], ({0: N},))


@model({"x": [1, 1, 8, 20]})
def dynamo_crnn(path):
    return dynamo(Crnn(), (torch.randn(3, 1, 8, 20),), path, ["x"], ["y"], ({0: N},))


@model({"x": [1, 5, 4], "lengths": [1]}, below={"lengths": 5})
def dynamo_gru_with_lengths(path):
    return dynamo(
        Packed(), (torch.randn(3, 5, 4), torch.tensor([3, 5, 2])), path, ["x", "lengths"], ["y"], ({0: N}, {0: N})
    )


@model({"x": [1, 8]})
def dynamo_experts(path):
    return dynamo(Experts(), (torch.randn(3, 8),), path, ["x"], ["y"], ({0: N},))


@model({"x": [1, 5, 4], "mask": [1, 5]}, below={"mask": 2})
def dynamo_masked_frames(path):
    example = torch.randn(3, 5, 4), torch.tensor([[1] * 5, [1] * 3 + [0] * 2, [1] + [0] * 4])
    return dynamo(MaskedFrames(), example, path, ["x", "mask"], ["y"], ({0: N, 1: S}, {0: N, 1: S}))


@model({"x": [1, 5, 4], "mask": [1, 5]}, below={"mask": 2}, independent=False)
def dynamo_centred_frames(path):
    example = torch.randn(3, 5, 4), torch.tensor([[1] * 5, [1] * 3 + [0] * 2, [1] + [0] * 4])
    return dynamo(CentredFrames(), example, path, ["x", "mask"], ["y"], ({0: N, 1: S}, {0: N, 1: S}))


@model({"images": [1, 6], "texts": [1, 6]}, independent=False)
def dynamo_images_and_texts(path):
    return dynamo(Images(), (torch.randn(3, 6), torch.randn(3, 6)), path, ["images", "texts"], ["y"], ({0: N}, {0: N}))


@model({"x": [1, 6]}, independent=False)
def dynamo_centred_batch(path):
    return dynamo(Centred(), (torch.randn(3, 6),), path, ["x"], ["y"], ({0: N},))


# transformers.


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def _text(net, path, exporter):
    net.config.return_dict = False
    example = torch.ones(2, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.long)
    names = ["input_ids", "attention_mask"]

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, ids, mask):
            return self.net(input_ids=ids, attention_mask=mask)[0]

    made = f", transformers {version('transformers')}"
    if exporter == "script":
        axes = {name: {0: "batch_size", 1: "sequence_length"} for name in names}
        return script(First(), example, path, names, ["last_hidden_state"], axes) + made
    example = tuple(torch.cat([one, one[:1]]) for one in example)
    return dynamo(First(), example, path, names, ["last_hidden_state"], ({0: N, 1: S}, {0: N, 1: S})) + made


TEXT = ({"input_ids": [1, 6], "attention_mask": [1, 6]},)
BELOW = {"input_ids": 40, "attention_mask": 2}


@model(*TEXT, below=BELOW)
def transformers_bert(path):
    import transformers as t

    config = t.BertConfig(vocab_size=40, **SMALL, max_position_embeddings=32, attn_implementation="eager")
    return _text(t.BertModel(config, add_pooling_layer=False), path, "script")


@model(*TEXT, below=BELOW)
def transformers_bert_dynamo(path):
    import transformers as t

    config = t.BertConfig(vocab_size=40, **SMALL, max_position_embeddings=32)
    return _text(t.BertModel(config, add_pooling_layer=False), path, "dynamo")


@model(*TEXT, below=BELOW)
def transformers_distilbert(path):
    import transformers as t

    config = t.DistilBertConfig(
        vocab_size=40,
        max_position_embeddings=32,
        n_layers=1,
        n_heads=2,
        dim=16,
        hidden_dim=32,
        attn_implementation="eager",
    )
    return _text(t.DistilBertModel(config), path, "script")


@model(*TEXT, below=BELOW)
def transformers_t5_encoder(path):
    import transformers as t

    config = t.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return _text(t.T5EncoderModel(config), path, "script")


@model({"pixel_values": [1, 3, 16, 16]})
def transformers_vit(path):
    import transformers as t

    config = t.ViTConfig(**SMALL, image_size=16, patch_size=8, attn_implementation="eager", num_labels=3)

    class Logits(t.ViTForImageClassification):
        def forward(self, pixel_values):
            return super().forward(pixel_values).logits

    net = Logits(config)
    axes = {"pixel_values": {0: "batch_size"}, "logits": {0: "batch_size"}}
    made = script(net, torch.randn(2, 3, 16, 16), path, ["pixel_values"], ["logits"], axes)
    return f"{made}, transformers {version('transformers')}"


@model({"pixel_values": [1, 3, 32, 32], "pixel_mask": [1, 32, 32]}, below={"pixel_mask": 2})
def transformers_detr(path):
    import transformers as t

    backbone = t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
    backbone.out_features = ["stage2"]
    config = t.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone, d_model=16, num_queries=5,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, attn_implementation="eager",
    )  # fmt: skip

    class Boxes(t.DetrForObjectDetection):
        def forward(self, pixel_values, pixel_mask):
            found = super().forward(pixel_values, pixel_mask=pixel_mask)
            return found.logits, found.pred_boxes

    size = {0: "batch_size", 2: "height", 3: "width"}
    axes = {"pixel_values": size, "pixel_mask": {0: "batch_size", 1: "height", 2: "width"}}
    example = torch.randn(2, 3, 32, 32), torch.ones(2, 32, 32, dtype=torch.long)
    made = script(Boxes(config), example, path, list(axes), ["logits", "boxes"], axes)
    return f"{made}, transformers {version('transformers')}"


@model({"input_values": [1, 200]})
def transformers_wavlm(path):
    import transformers as t

    config = t.WavLMConfig(
        **SMALL, conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 4), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )  # fmt: skip

    class Frames(t.WavLMModel):
        def forward(self, input_values):
            return super().forward(input_values)[0]

    axes = {"input_values": {0: "batch_size", 1: "samples"}}
    made = script(Frames(config), torch.randn(2, 200), path, ["input_values"], ["frames"], axes)
    return f"{made}, transformers {version('transformers')}"


# scikit-learn.


def _data(columns=4, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(80, columns)).astype(np.float32)
    return x, (np.abs(x).argmax(1) % classes).astype(np.int64)


def sklearn(estimator, path, *, zipmap=False, regress=False, **options):
    import skl2onnx
    import sklearn as library
    from skl2onnx.common.data_types import FloatTensorType

    x, y = _data()
    estimator.fit(x, x[:, 0] * 2 - x[:, 1] if regress else y)
    if hasattr(estimator, "predict_proba"):
        options = {"options": {id(estimator): {"zipmap": zipmap}}}
    made = skl2onnx.convert_sklearn(
        estimator, initial_types=[("x", FloatTensorType([None, 4]))], target_opset={"": 18, "ai.onnx.ml": 3}, **options
    )
    onnx.save(made, path)
    return f"skl2onnx {skl2onnx.__version__}, scikit-learn {library.__version__}"


X4 = {"x": [1, 4]}


@model(X4)
def sklearn_logistic_regression(path):
    from sklearn.linear_model import LogisticRegression

    return sklearn(LogisticRegression(), path)


@model(X4)
def sklearn_random_forest_with_zipmap(path):
    from sklearn.ensemble import RandomForestClassifier

    return sklearn(RandomForestClassifier(5, max_depth=4, random_state=0), path, zipmap=True)


@model(X4)
def sklearn_gradient_boosting(path):
    from sklearn.ensemble import GradientBoostingRegressor

    return sklearn(GradientBoostingRegressor(n_estimators=8, random_state=0), path, regress=True)


@model(X4)
def sklearn_svc(path):
    from sklearn.svm import SVC

    return sklearn(SVC(probability=True, random_state=0), path)


@model(X4)
def sklearn_nearest_neighbours(path):
    from sklearn.neighbors import KNeighborsClassifier

    return sklearn(KNeighborsClassifier(3), path)


@model(X4)
def sklearn_k_means(path):
    from sklearn.cluster import KMeans

    return sklearn(KMeans(3, random_state=0), path)


@model(X4)
def sklearn_isolation_forest(path):
    from sklearn.ensemble import IsolationForest

    return sklearn(IsolationForest(n_estimators=5, max_samples=32, random_state=0), path)


@model(X4)
def sklearn_naive_bayes(path):
    from sklearn.naive_bayes import GaussianNB

    return sklearn(GaussianNB(), path)


@model(X4)
def sklearn_pipeline(path):
    from sklearn.decomposition import PCA
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    net = MLPClassifier((8,), max_iter=40, random_state=0)
    return sklearn(make_pipeline(StandardScaler(), PolynomialFeatures(2), PCA(5), net), path)


@model(X4)
def sklearn_gaussian_process(path):
    from sklearn.gaussian_process import GaussianProcessRegressor

    return sklearn(GaussianProcessRegressor(), path, regress=True)


@model(X4)
def sklearn_stack(path):
    from sklearn.ensemble import StackingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.tree import DecisionTreeClassifier

    tree = DecisionTreeClassifier(max_depth=3, random_state=0)
    return sklearn(StackingClassifier([("a", tree), ("b", LogisticRegression())], cv=2), path)


@model({"age": [1, 1], "town": [1, 1]})
def sklearn_columns_of_texts(path):
    import pandas
    import skl2onnx
    import sklearn as library
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"age": rng.normal(40, 9, 60), "town": rng.choice(["red", "green", "blue"], 60)})
    columns = ColumnTransformer(
        [("n", StandardScaler(), ["age"]), ("t", OneHotEncoder(handle_unknown="ignore"), ["town"])]
    )
    net = make_pipeline(columns, LogisticRegression())
    net.fit(frame, frame["age"] > 40)
    types = [("age", FloatTensorType([None, 1])), ("town", StringTensorType([None, 1]))]
    onnx.save(skl2onnx.convert_sklearn(net, initial_types=types, options={id(net): {"zipmap": False}}), path)
    return f"skl2onnx {skl2onnx.__version__}, scikit-learn {library.__version__}"


@model({"text": [1, 1]})
def sklearn_words(path):
    import skl2onnx
    import sklearn as library
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    net = make_pipeline(TfidfVectorizer(token_pattern="[a-z]+", lowercase=False), LogisticRegression())
    net.fit(["red a b", "green c", "blue a", "red green b c", "a b c", "blue blue"], [0, 1, 1, 0, 0, 1])
    made = skl2onnx.convert_sklearn(
        net, initial_types=[("text", StringTensorType([None, 1]))], options={id(net): {"zipmap": False}}
    )
    onnx.save(made, path)
    return f"skl2onnx {skl2onnx.__version__}, scikit-learn {library.__version__}"


# Trees by onnxmltools.


def _by_onnxmltools(convert, net, path, library):
    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    onnx.save(convert(onnxmltools)(net, initial_types=[("x", FloatTensorType([None, 4]))], target_opset=15), path)
    return f"onnxmltools {onnxmltools.__version__}, {library} {version(library)}"


@model(X4)
def lightgbm_classifier(path):
    import lightgbm

    net = lightgbm.LGBMClassifier(n_estimators=4, num_leaves=6, verbose=-1).fit(*_data())
    return _by_onnxmltools(lambda tools: tools.convert_lightgbm, net, path, "lightgbm")


@model(X4)
def lightgbm_regressor(path):
    import lightgbm

    x, _ = _data()
    net = lightgbm.LGBMRegressor(n_estimators=4, num_leaves=6, verbose=-1).fit(x, x[:, 0])
    return _by_onnxmltools(lambda tools: tools.convert_lightgbm, net, path, "lightgbm")


@model(X4)
def xgboost_classifier(path):
    import xgboost

    net = xgboost.XGBClassifier(n_estimators=4, max_depth=3).fit(*_data())
    return _by_onnxmltools(lambda tools: tools.convert_xgboost, net, path, "xgboost")


@model(X4)
def xgboost_regressor(path):
    import xgboost

    x, _ = _data()
    net = xgboost.XGBRegressor(n_estimators=4, max_depth=3).fit(x, x[:, 0])
    return _by_onnxmltools(lambda tools: tools.convert_xgboost, net, path, "xgboost")


# Quantized, converted and optimized by ONNX Runtime's tools.


def _ort(made):
    return f"{made}, onnxruntime {version('onnxruntime')}"


class _Samples:
    def __init__(self, name, shape):
        self._left = iter([{name: np.random.default_rng(i).normal(size=shape).astype(np.float32)} for i in range(4)])

    def get_next(self):
        return next(self._left, None)


def _prepared(write, folder):
    source, ready = Path(folder) / "source.onnx", Path(folder) / "ready.onnx"
    made = write(source)
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(source, ready, skip_symbolic_shape=True)
    return made, ready


def _static(path, write, name, shape, form):
    from onnxruntime.quantization import QuantFormat, quantize_static

    with tempfile.TemporaryDirectory() as folder:
        made, ready = _prepared(write, folder)
        quantize_static(ready, path, _Samples(name, shape), quant_format=QuantFormat[form])
    return _ort(made + f", quantize_static {form}")


@model({"x": [1, 3, 16, 16]})
def quantized_cnn_qdq(path):
    return _static(path, torch_cnn, "x", (1, 3, 16, 16), "QDQ")


@model({"x": [1, 3, 16, 16]})
def quantized_cnn_qoperator(path):
    return _static(path, torch_cnn, "x", (1, 3, 16, 16), "QOperator")


@model({"x": [1, 8]})
def quantized_mlp_qoperator(path):
    return _static(path, torch_mlp, "x", (1, 8), "QOperator")


def _dynamic(path, write):
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        made, ready = _prepared(write, folder)
        quantize_dynamic(ready, path)
    return _ort(made + ", quantize_dynamic")


@model({"x": [1, 8]}, independent=False)
def quantized_mlp_dynamic(path):
    return _dynamic(path, torch_mlp)


@model({"ids": [1, 6], "mask": [1, 6]}, below={"ids": 20, "mask": 2}, independent=False)
def quantized_encoder_dynamic(path):
    return _dynamic(path, torch_encoder)


def _optimized(path, write, level):
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source.onnx"
        made = write(source)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.optimized_model_filepath = str(path)
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    return _ort(f"{made}, {level}")


@model({"x": [1, 3, 16, 16]})
def optimized_cnn(path):
    return _optimized(path, torch_cnn, "ORT_ENABLE_EXTENDED")


@model({"ids": [1, 6], "mask": [1, 6]}, below={"ids": 20, "mask": 2})
def optimized_encoder(path):
    return _optimized(path, torch_encoder, "ORT_ENABLE_EXTENDED")


@model(*TEXT, below=BELOW)
def optimized_bert(path):
    return _optimized(path, transformers_bert, "ORT_ENABLE_EXTENDED")


@model({"x": [1, 3, 16, 16]})
def half_cnn(path):
    from onnxruntime.transformers.float16 import convert_float_to_float16

    made = torch_cnn(path)
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), path)
    return _ort(made + ", float16")


@model({"ids": [1, 6], "mask": [1, 6]}, below={"ids": 20, "mask": 2})
def four_bit_encoder(path):
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    made = torch_encoder(path)
    quantizer = MatMulNBitsQuantizer(onnx.load(path), block_size=16)
    quantizer.process()
    onnx.save(quantizer.model.model, path)
    return _ort(made + ", MatMulNBitsQuantizer")


def main(names):
    manifest_path = FOLDER / "manifest.json"
    manifest = json.loads(manifest_path.read_text()) if manifest_path.exists() else {}
    for name, (write, shapes, below, independent, axes) in MODELS.items():
        if names and name not in names:
            continue
        path = FOLDER / f"{name}.onnx"
        torch.manual_seed(0)
        try:
            made = write(path)
        except Exception as error:
            path.unlink(missing_ok=True)
            sys.stderr.write(f"{name}: {type(error).__name__} {str(error)[:300]}\n")
            continue
        loaded = onnx.load(path)
        loaded.doc_string = ""
        for node in loaded.graph.node:
            node.doc_string = ""
        onnx.save(loaded, path)
        size = path.stat().st_size
        if size > MAX_BYTES:
            sys.stderr.write(f"{name}: {size} bytes are too many\n")
        entry = {"made_by": made, "shapes": shapes, "independent": independent}
        if below:
            entry["below"] = below
        if axes:
            entry["axes"] = axes
        manifest[name] = entry
    manifest = dict(sorted(manifest.items()))
    manifest_path.write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main(set(sys.argv[1:]))
