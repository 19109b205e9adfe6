"""Checkpoints as folders for other tools: `tinsmith export` on a running installation."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import peft
import pyrage
import pytest
import torch
from tests.integration.management.test_checkpoints import blobs
from tests.integration.management.test_external import fetch
from tests.integration.steps import PROBE, new_model, probe, step
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]


@pytest.fixture(scope="module")
def run(managed, tinker):
    """Calls a command of ours."""

    def run(*args):
        command = [sys.executable, "-m", "tinsmith", *map(str, args)]
        command += ["--config", str(managed.folder / "tinsmith.toml")]
        command += ["--data-dir", str(managed.folder / "data")]
        environ = os.environ | {"TINKER_API_KEY": managed.api_key}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, env=environ
        )

    return run


@pytest.fixture
def model(alice):
    trained = new_model(alice[0], seed=4242)
    step(trained)
    return trained


def scores(model):
    """What the probe gets from a model of transformers."""
    ids = torch.tensor(PROBE.model_input.to_ints())
    targets = torch.tensor([int(one) for one in PROBE.loss_fn_inputs["target_tokens"].data])
    with torch.no_grad():
        logprobs = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    return logprobs[torch.arange(len(ids)), targets].numpy()


def test_peft_and_transformers_load_what_is_exported(run, model, model_folder, tmp_path):
    path = model.save_state("mark").result().path

    adapter = run("export", path, tmp_path / "adapter")
    merged = run("export", f"{model.model_id}/mark", tmp_path / "merged", "--merge")

    assert (adapter.returncode, merged.returncode) == (0, 0), adapter.stderr + merged.stderr
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with_adapter = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    for other in (with_adapter, whole):
        np.testing.assert_allclose(scores(other), probe(model), rtol=0, atol=1e-3)
    tokenizer = (model_folder / "tokenizer.json").read_bytes()
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == tokenizer


def test_the_output_layer_can_be_left_out(run, model, model_folder, tmp_path):
    path = model.save_weights_for_sampler("mark").result().path

    for name, options in (("adapter", []), ("merged", ["--merge"])):
        done = run("export", path, tmp_path / name, "--no-unembed", *options)
        assert done.returncode == 0, done.stderr

    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with_adapter = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert not any("lora" in name and "lm_head" in name for name, _ in with_adapter.named_modules())
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert whole.config.tie_word_embeddings
    np.testing.assert_allclose(scores(whole), scores(with_adapter), rtol=0, atol=1e-4)
    assert not np.allclose(scores(whole), probe(model), atol=1e-4)


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(run, alice, model, tmp_path):
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    sealed = model.save_weights_external("x", age_encryption_recipients=[recipient]).result().path
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()

    for args, words in {
        (sealed, "new"): "is encrypted to its recipients",
        (f"{model.model_id}/nothing", "new"): "has no nothing; it has external_weights/x",
        ("zzzz/mark", "new"): "no run begins with 'zzzz'",
        ("mark", "new"): "names none; write RUN/NAME",
        (sealed, "full"): "exists and is no empty folder",
    }.items():
        done = run("export", args[0], tmp_path / args[1])
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr

    assert {file.name for file in tmp_path.iterdir()} == {"full"}
    assert set(fetch(alice[1], sealed)) == {
        "adapter_config.json.age",
        "adapter_model.safetensors.age",
    }


def test_an_adapter_from_elsewhere_is_trained_and_sampled_from(
    run, alice, bob, tinker, model_folder, tmp_path
):
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=targets))
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    expected = scores(theirs)
    options = ["--base", "tiny/llama", "--name", "elsewhere", "--any-base"]

    done = run("import", tmp_path / "adapter", *options)

    assert done.returncode == 0, done.stderr
    training, sampling = (word for word in done.stdout.split() if word.startswith("tinker://"))
    model = alice[0].create_training_client_from_state(training).result()
    np.testing.assert_allclose(probe(model), expected, rtol=0, atol=1e-3)
    assert step(model) > step(model)
    sampler = alice[0].create_sampling_client(model_path=sampling).result()
    tokens = [*PROBE.model_input.to_ints(), int(PROBE.loss_fn_inputs["target_tokens"].data[-1])]
    drawn = sampler.compute_logprobs(tinker.types.ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(drawn[1:], expected, rtol=0, atol=1e-3)
    with pytest.raises(Exception, match="there is no checkpoint"):
        bob[0].create_training_client_from_state(training).result()


def test_a_refused_import_writes_nothing(run, managed, alice, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").touch()
    before = blobs(managed)
    runs = alice[1].list_training_runs().result().cursor.total_count

    for options, words in (
        (["--base", "tiny/llama", "--name", "x"], "adapter_model.bin is a pickle"),
        (["--base", "tiny/llama", "--name", "../x"], "'../x' cannot name a checkpoint"),
        (["--base", "tiny/other", "--name", "x"], "model 'tiny/other' is not configured"),
        (["--base", "tiny/llama:full", "--name", "x"], "--base: an adapter needs"),
    ):
        done = run("import", tmp_path, *options)
        assert done.returncode in {1, 2}
        assert words in done.stderr

    assert blobs(managed) <= before
    assert alice[1].list_training_runs().result().cursor.total_count == runs
