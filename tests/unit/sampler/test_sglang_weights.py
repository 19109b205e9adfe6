"""The weight loader that runs in SGLang, on a model that holds its tensors as SGLang does."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tinsmith.weights.digest import digest, part, salt
from tinsmith.weights.held import Write
from tinsmith_sampler.sglang import distant_memory
from tinsmith_sampler.sglang.boot import digesting, places, weights, witness
from tinsmith_sampler.sglang.boot.weights import Weights

WORDS = {torch.float32: (torch.int32, np.uint32), torch.bfloat16: (torch.int16, np.uint16)}
HIDDEN, QUERY, KEY, GATE, VOCABULARY, PADDED = 8, 12, 4, 10, 30, 64


@pytest.fixture(params=WORDS)
def model(request):
    return Fused().to(request.param)


class Fused(nn.Module):
    """Attention, MLP, experts and embeddings under SGLang's names and in its layout."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=True)
        layer = nn.Module()
        layer.self_attn, layer.mlp, layer.experts = nn.Module(), nn.Module(), nn.Module()
        qkv = layer.self_attn.qkv_proj = nn.Linear(HIDDEN, QUERY + 2 * KEY)
        qkv.q_proj_shard_size, qkv.kv_proj_shard_size = QUERY, KEY
        up = layer.mlp.gate_up_proj = nn.Linear(HIDDEN, 2 * GATE, bias=False)
        up.output_partition_sizes = [GATE, GATE]
        layer.experts.w13_weight = nn.Parameter(torch.randn(3, 2 * GATE, HIDDEN))
        layer.experts.w2_weight = nn.Parameter(torch.randn(3, HIDDEN, GATE))
        layer.norm = nn.LayerNorm(HIDDEN, bias=False)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([layer])
        self.model.embed_tokens = nn.Embedding(PADDED, HIDDEN)
        self.lm_head = nn.Embedding(PADDED, HIDDEN)  # tied, and a parameter of its own
        for table in (self.model.embed_tokens, self.lm_head):
            table.org_vocab_size = VOCABULARY
            nn.init.ones_(table.weight)

    def expected(self):
        """Each tensor, by its name in transformers."""
        layer, owner = self.model.layers[0], "model.layers.0"
        query, key, value = layer.self_attn.qkv_proj.weight.split([QUERY, KEY, KEY])
        biases = layer.self_attn.qkv_proj.bias.split([QUERY, KEY, KEY])
        gate, up = layer.mlp.gate_up_proj.weight.split(GATE)
        return {
            "model.embed_tokens.weight": self.model.embed_tokens.weight[:VOCABULARY],
            f"{owner}.self_attn.q_proj.weight": query,
            f"{owner}.self_attn.k_proj.weight": key,
            f"{owner}.self_attn.v_proj.weight": value,
            f"{owner}.self_attn.q_proj.bias": biases[0],
            f"{owner}.self_attn.k_proj.bias": biases[1],
            f"{owner}.self_attn.v_proj.bias": biases[2],
            f"{owner}.mlp.gate_proj.weight": gate,
            f"{owner}.mlp.up_proj.weight": up,
            f"{owner}.experts.gate_up_proj": layer.experts.w13_weight,
            f"{owner}.experts.down_proj": layer.experts.w2_weight,
            f"{owner}.norm.weight": layer.norm.weight,
        }

    def bits(self, name):
        tensor = self.expected()[name].detach().reshape(-1)
        word, unsigned = WORDS[tensor.dtype]
        return tensor.view(word).numpy().view(unsigned).copy()


@pytest.fixture
def loader(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    return Weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 1000, (1 << 16) + 7, 3 << 16])
def test_digests_are_ours(dtype, size):
    word, unsigned = WORDS[dtype]
    bits = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype).view(word)
    ours = bits.numpy().view(unsigned)

    assert digesting.digest(bits, salt("a.b")) == digest("a.b", ours)
    at = np.arange(0, size, 3)
    keys = digesting.keys(torch.from_numpy(at), salt("a.b"))
    sizes = [len(at) // 3, len(at) - len(at) // 3]
    first, second = np.split(at, [sizes[0]])
    found = digesting.digest_parts(keys, bits[torch.from_numpy(at)], sizes)
    assert found == [part("a.b", first, ours[first]), part("a.b", second, ours[second])]


def test_every_tensor_is_found_where_the_model_holds_it(model):
    found = places.find(model)

    assert found.keys() == model.expected().keys()
    for name, tensor in model.expected().items():
        word, _ = WORDS[tensor.dtype]
        for place in found[name]:
            assert torch.equal(place.bits(), tensor.detach().reshape(-1).view(word)), name


def test_elements_and_whole_tensors_are_written_and_told(model, loader, tmp_path):
    held, rng = loader(model), np.random.default_rng(0)
    writes = []
    for number, name in enumerate(model.expected()):
        old = model.bits(name)
        at = None if number % 3 == 0 else np.sort(rng.permutation(old.size)[: old.size // 3])
        new = old ^ old.dtype.type(5) if at is None else old[at] ^ old.dtype.type(3)
        writes.append(Write(name, new, at))
    wanted = {write.name: after(model, write) for write in writes}
    distant_memory._write_file(tmp_path / "change-1", writes)
    staged = held.answer(tmp_path, {"ask": "stage", "file": "change-1"})["sums"]
    assert [set(sums) for sums in staged] == [{summed(one)} for one in writes]
    for name in model.expected():
        assert (model.bits(name) != wanted[name]).any()  # nothing is written yet
    held.take("change-1")

    taken = held.answer(tmp_path, {"ask": "taken"})
    assert taken["file"] == "change-1"
    for write, sums in zip(writes, taken["sums"], strict=True):
        np.testing.assert_array_equal(model.bits(write.name), wanted[write.name])
        assert set(sums) == {summed(write)}
        asked = {"ask": "digest", "name": write.name, "salt": salt(write.name)}
        told = held.answer(tmp_path, asked)["digests"]
        assert set(told) == {digest(write.name, wanted[write.name])}
    assert torch.equal(model.lm_head.weight[:VOCABULARY], model.model.embed_tokens.weight[:30])
    assert (model.lm_head.weight[VOCABULARY:] == 1).all()


def summed(write):
    """What ``write`` adds to its tensor's digest."""
    if write.indices is None:
        return digest(write.name, write.values)
    return part(write.name, write.indices, write.values)


def after(model, write):
    new = model.bits(write.name)
    new[slice(None) if write.indices is None else write.indices] = write.values
    return new


def test_what_is_wrong_is_told_and_nothing_is_written(model, loader, tmp_path):
    held, name = loader(model), "model.layers.0.norm.weight"
    before = {each: model.bits(each) for each in model.expected()}
    good = Write("model.embed_tokens.weight", before["model.embed_tokens.weight"] ^ 1, None)
    kind = before[name].dtype
    wrongs = [
        Write(name, np.zeros(1, kind), np.array([HIDDEN])),
        Write(name, np.zeros(1, kind), np.array([-1])),
        Write(name, np.zeros(1, kind), None),
        Write("norm", np.zeros(1, kind), np.array([0])),
    ]
    for number, wrong in enumerate(wrongs):
        distant_memory._write_file(tmp_path / str(number), [good, wrong])
        with pytest.raises(ValueError, match=r"the change|no norm here"):
            held.answer(tmp_path, {"ask": "stage", "file": str(number)})
        held.take(str(number))
        assert "not staged" in held.answer(tmp_path, {"ask": "taken"})["error"]
    with pytest.raises(FileNotFoundError):
        held.answer(tmp_path, {"ask": "stage", "file": "nothing"})
    (tmp_path / "cut").write_bytes((tmp_path / "0").read_bytes()[:40])
    with pytest.raises(ValueError):  # noqa: PT011 - numpy's or json's
        held.answer(tmp_path, {"ask": "stage", "file": "cut"})
    for each, bits in before.items():
        np.testing.assert_array_equal(model.bits(each), bits)


def test_memory_that_does_not_hold_what_was_written_is_told(model, loader, tmp_path, monkeypatch):
    held, name = loader(model), "model.layers.0.norm.weight"
    old = model.bits(name)
    write = Write(name, old[:2] ^ old.dtype.type(1), np.array([0, 1]))
    distant_memory._write_file(tmp_path / "change-1", [write])
    held.answer(tmp_path, {"ask": "stage", "file": "change-1"})
    deaf = held._places[name][0].bits().as_subclass(Deaf)
    monkeypatch.setattr(places.Place, "bits", lambda _: deaf)
    held.take("change-1")

    (sums,) = held.answer(tmp_path, {"ask": "taken"})["sums"]
    at = np.array([0, 1])
    assert sums == [part(name, at, old[:2])]
    with pytest.raises(distant_memory.WrongBits, match="does not hold"):
        distant_memory._prove({name: summed(write)}, [sums], "does not hold")


@pytest.mark.parametrize("is_deaf", [True, False])
def test_a_whole_tensor_that_is_not_what_was_summed_is_told(
    model, loader, tmp_path, monkeypatch, is_deaf
):
    held, name = loader(model), "model.layers.0.norm.weight"
    old = model.bits(name)
    write = Write(name, old ^ old.dtype.type(1), None)
    distant_memory._write_file(tmp_path / "change-1", [write])
    held.answer(tmp_path, {"ask": "stage", "file": "change-1"})
    if is_deaf:
        deaf = held._places[name][0].bits().as_subclass(Deaf)
        monkeypatch.setattr(places.Place, "bits", lambda _: deaf)
    else:  # what was read has become something else since
        with torch.inference_mode():
            held._prepared[1]._all[0]._slot.part.values[3] ^= 2
    held.take("change-1")

    (sums,) = held.answer(tmp_path, {"ask": "taken"})["sums"]
    assert sums == [digest(name, model.bits(name))] != [summed(write)]


def test_a_whole_tensor_of_many_steps_is_written_and_proven(loader, tmp_path, monkeypatch):
    model = Fused()
    held, name = loader(model), "model.layers.0.experts.gate_up_proj"
    monkeypatch.setattr(digesting, "_ON_CPU", 7)
    write = Write(name, model.bits(name) ^ np.uint32(9), None)
    distant_memory._write_file(tmp_path / "change-1", [write])
    held.answer(tmp_path, {"ask": "stage", "file": "change-1"})
    held.take("change-1")

    assert held.answer(tmp_path, {"ask": "taken"})["sums"] == [[summed(write)]]
    np.testing.assert_array_equal(model.bits(name), write.values)


def test_nothing_is_compared_before_all_is_written(model, loader, tmp_path, monkeypatch):
    """What was written last is in a core's cache, and read from there."""
    held, equal, missing = loader(model), torch.equal, []
    names = ["model.embed_tokens.weight", "model.layers.0.norm.weight"]
    writes = [Write(name, ~model.bits(name), None) for name in names]
    distant_memory._write_file(tmp_path / "change-1", writes)
    held.answer(tmp_path, {"ask": "stage", "file": "change-1"})

    def noted(*tensors):
        missing.extend(one.name for one in writes if (model.bits(one.name) != one.values).any())
        return equal(*tensors)

    monkeypatch.setattr(torch, "equal", noted)
    held.take("change-1")

    told = held.answer(tmp_path, {"ask": "taken"})["sums"]
    assert [set(sums) for sums in told] == [{summed(one)} for one in writes]
    assert missing == []


class Deaf(torch.Tensor):
    """Memory that takes nothing."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.scatter_, torch.Tensor.copy_):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def test_questions_are_answered_beside_the_service(model, loader, tmp_path, monkeypatch):
    monkeypatch.setenv(weights.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(weights, "_weights", None)
    weights.apply(model, [("change", torch.tensor([], dtype=torch.uint8))])

    told = distant_memory._asked(tmp_path, {"ask": "arrays"})
    assert told["ranks"] == 1
    assert told["arrays"] == {name: one.numel() for name, one in model.expected().items()}
    with pytest.raises(distant_memory.SglangGone, match="KeyError"):
        distant_memory._asked(tmp_path, {"ask": "digest", "name": "no", "salt": 1})
    assert "tinsmith-weights" in {thread.name for thread in threading.enumerate()}
    assert (tmp_path / witness.SOCKET).is_socket()
