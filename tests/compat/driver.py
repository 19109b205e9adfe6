"""Calls every public method and command of the tinker client that it runs with, by inspection.

Runs in that client's own environment: python driver.py SCENE RESULT, with TINKER_BASE_URL and
TINKER_API_KEY of a live server. SCENE names the model, and what is not to be called. One file
for all versions: what a method needs is told by the names of its parameters.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import itertools
import json
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import numpy as np
import tinker
import torch
from click.testing import CliRunner
from tinker import types as T
from tinker.cli.__main__ import main_cli
from tinker.lib.api_future_impl import _APIFuture
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

HANGS_AFTER_S = 500
CALL_S = 60
TOKENS = list(range(5, 25))
DAY = timedelta(days=1)


def datum(tokens=TOKENS, **inputs):
    inputs = inputs or {
        "target_tokens": np.array([*tokens[1:], tokens[0]]),
        "weights": np.linspace(0, 1, len(tokens), dtype=np.float32),
    }
    return T.Datum(model_input=T.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


def sparse_datum():
    """Sent as CSR, by clients that have torch."""
    targets = torch.zeros(len(TOKENS), 8, dtype=torch.int64)
    targets[::2, 0], targets[1::2, 3] = 7, 9
    return datum(target_tokens=targets, weights=(targets > 0).to(torch.float32))


def custom_loss(data, logprobs):
    loss = torch.stack([torch.exp(-x).sum() for x in logprobs]).sum()
    return loss, {"custom:sum": loss.item()}


def datum_loss(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/mine:sum": loss}


def settled(value):
    """What a call stands for: its future's result."""
    result = getattr(value, "result", None)
    if not callable(result):
        return value
    takes_timeout = "timeout" in inspect.signature(result).parameters
    return result(timeout=CALL_S) if takes_timeout else result()


async def awaited(value):
    value = await value
    if callable(getattr(value, "result_async", None)):
        value = await value.result_async(timeout=CALL_S)
    return value


class Scene:
    """A training run with one of everything, and the values by which it is asked for."""

    def __init__(self, model):
        self.model = model
        self.numbers = itertools.count()
        self.service = tinker.ServiceClient()
        self.training = self.new_model()
        self.run_id = self.training.model_id
        self.session_id = self.run_id.partition(":")[0]
        settled(self.training.forward_backward([datum()], "cross_entropy"))
        settled(self.training.optim_step(T.AdamParams(learning_rate=1e-3)))
        self.state = self.saved()
        self.sampler = settled(self.training.save_weights_for_sampler("sampler")).path
        self.sampling = settled(self.service.create_sampling_client(model_path=self.sampler))
        self.rest = self.service.create_rest_client()
        self.sampler_id = settled(self.rest.get_session(self.session_id)).sampler_ids[0]

    def new_model(self):
        return settled(self.service.create_lora_training_client(self.model, rank=8, seed=7))

    def saved(self):
        return settled(self.training.save_state(self.name())).path

    def name(self):
        return f"n{next(self.numbers)}"

    def clients(self):
        """Of each public class one; ServiceClient last, which ends the session."""
        found = [self.training, self.sampling, self.rest]
        if hasattr(tinker, "AdminClient"):
            found.append(tinker.AdminClient())
        return [*found, self.service]

    def value(self, method, parameter):
        """What a method is given for a parameter; fails for one that is not known here."""
        if method.startswith("delete_") and parameter != "training_run_id":
            path = self.saved()
            return path if parameter == "tinker_path" else "/".join(path.split("/")[-2:])
        if "external" in method and parameter == "tinker_path":
            return settled(self.training.save_weights_external(self.name())).path
        if "custom" in method and parameter == "loss_fn":
            return custom_loss
        if (make := self.values().get(parameter)) is None:
            raise NotImplementedError(f"the driver has no value for {parameter!r}")
        return make()

    def values(self):
        now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        return {
            "adam_params": lambda: T.AdamParams(learning_rate=0.0),
            "base_model": lambda: self.model,
            "checkpoint_id": lambda: "/".join(self.state.split("/")[-2:]),
            "data": lambda: [datum(), datum(TOKENS[::-1])],
            "ending_before": lambda: now + DAY,
            "fn": lambda: datum_loss,
            "handle": lambda: self.sampling.get_sampler_handle(),  # noqa: PLW0108 - not in all
            "holder": lambda: self.service.holder,
            "input_ranks": lambda: {"logprobs": 1, "weights": 1},
            "loss_fn": lambda: "cross_entropy",
            "model_path": lambda: self.sampler,
            "name": self.name,
            "num_samples": lambda: 2,
            "optim_params": lambda: T.AdamParams(learning_rate=0.0),
            "path": lambda: self.state,
            "project_id": lambda: "compat",
            "prompt": lambda: T.ModelInput.from_ints(TOKENS),
            "rank": lambda: 8,
            "request": lambda: T.SessionSearchRequest(session_id=self.session_id),
            "sampler_id": lambda: self.sampler_id,
            "sampling_params": lambda: T.SamplingParams(max_tokens=4, seed=3, temperature=1.0),
            "seed": lambda: 7,
            "session_id": lambda: self.session_id,
            "starting_on": lambda: now - DAY,
            "status": lambda: "success",
            "tinker_path": lambda: self.state,
            "training_run_id": lambda: self.run_id,
            "ttl_seconds": lambda: 7200,
        }


OPTIONAL = {"rank", "seed", "base_model", "optim_params", "adam_params"}
"""Parameters that are given although they have a default; of two that mean one thing the first."""


def arguments(scene, name, method):
    given = {}
    for parameter in inspect.signature(method).parameters.values():
        is_needed = parameter.default is parameter.empty
        is_second = parameter.name == "adam_params" and "optim_params" in given
        if is_needed or (parameter.name in OPTIONAL and not is_second):
            given[parameter.name] = scene.value(name, parameter.name)
    return given


def outcome(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return {"outcome": "raised", "detail": f"{type(error).__name__}: {error}"[:600]}
    return {"outcome": "ok"}


def call(scene, client, name):
    method = getattr(client, name)
    given = arguments(scene, name, method)
    if inspect.iscoroutinefunction(inspect.unwrap(method)):
        asyncio.run(awaited(method(**given)))
    else:
        settled(method(**given))


def public_methods(client):
    return [
        name
        for name, member in inspect.getmembers(type(client))
        if not name.startswith("_") and callable(member)
    ]


def called_methods(scene, not_called):
    found = {}
    for client in scene.clients():
        kind = type(client).__name__
        # What ends the client comes after all others.
        for name in sorted(public_methods(client), key=lambda name: (name == "close", name)):
            full = f"{kind}.{name}"
            if full in not_called:
                found[full] = {"outcome": "not called"}
            else:
                found[full] = outcome(lambda client=client, name=name: call(scene, client, name))
    return found


def commands(group, path=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "list_commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def command_line(scene, name, command):
    folder = tempfile.mkdtemp()
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    values = {
        "checkpoint_path": lambda: [scene.state],
        "checkpoint_paths": lambda: [scene.saved()],
        "ending_before": lambda: [(today + DAY).isoformat()],
        "output": lambda: ["--output", folder if "download" in name else f"{folder}/trace"],
        "run_id": lambda: [scene.run_id],
        "session_id": lambda: [scene.session_id],
        "starting_on": lambda: [(today - DAY).isoformat()],
        "ttl": lambda: ["--ttl", "7200"],
        "yes": lambda: ["-y"],
    }
    line = name.split()
    for parameter in command.params:
        if parameter.required or parameter.name in ("output", "ttl", "yes", "checkpoint_paths"):
            line += values[parameter.name]()
    return line


def run_command(scene, name, command, key):
    result = CliRunner().invoke(main_cli, command_line(scene, name, command), input=f"{key}\n")
    if result.exit_code != 0:
        error = result.exception
        told = f"{error} {getattr(error, 'details', '') or ''} {result.output}"
        raise RuntimeError(told)


def called_commands(scene, not_called, key):
    found = {}
    # Who logs out must have logged in.
    for name, command in sorted(commands(main_cli)):
        full = f"tinker {name}"
        if full in not_called:
            found[full] = {"outcome": "not called"}
        else:
            found[full] = outcome(
                lambda name=name, command=command: run_command(scene, name, command, key)
            )
    return found


def unload(scene):
    """Clients before 0.30 have it one layer below their public methods, none of which calls it."""
    holder, model_id = scene.service.holder, scene.new_model().model_id

    async def unloaded():
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            request = T.UnloadModelRequest(model_id=model_id)
            promise = await client.models.unload(request=request)
        future = _APIFuture(
            T.UnloadModelResponse,
            holder,
            promise,
            request_start_time=time.time(),
            request_type="UnloadModel",
        )
        return await future.result_async(timeout=CALL_S)

    assert holder.run_coroutine_threadsafe(unloaded()).result(CALL_S).model_id == model_id


def called_lower(scene):
    from tinker.resources.models import AsyncModelsResource

    if not hasattr(AsyncModelsResource, "unload"):
        return {}
    return {"AsyncModelsResource.unload": outcome(lambda: unload(scene))}


def figures(scene):
    """What every version must be told alike: it is one server and one seed."""
    model = scene.new_model()
    dense = settled(model.forward_backward([datum(), datum(TOKENS[::-1])], "cross_entropy"))
    sparse = settled(model.forward([sparse_datum()], "cross_entropy"))
    ratio = {
        "target_tokens": np.array([*TOKENS[1:], TOKENS[0]]),
        "logprobs": np.full(len(TOKENS), -6.5, np.float32),
        "advantages": np.linspace(-1, 1, len(TOKENS), dtype=np.float32),
    }
    clipped = settled(model.forward_backward([datum(**ratio)], "ppo", {"clip_low_threshold": 0.9}))
    settled(model.optim_step(T.AdamParams(learning_rate=1e-2)))
    after = settled(model.forward([datum()], "cross_entropy"))
    drawn = settled(
        scene.sampling.sample(
            T.ModelInput.from_ints(TOKENS),
            2,
            T.SamplingParams(max_tokens=5, seed=11, temperature=1.0),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
        )
    )
    return {
        "dense": [output["logprobs"].tolist() for output in dense.loss_fn_outputs],
        "dense loss": dense.metrics["loss:sum"],
        "sparse": [output["logprobs"].tolist() for output in sparse.loss_fn_outputs],
        "sparse loss": sparse.metrics["loss:sum"],
        "clipped loss": clipped.metrics["loss:sum"],
        "after a step": after.metrics["loss:sum"],
        "tokens": [list(sequence.tokens) for sequence in drawn.sequences],
        "logprobs": [list(sequence.logprobs) for sequence in drawn.sequences],
        "prompt logprobs": list(drawn.prompt_logprobs),
        "top of the prompt": [
            row and [list(cell) for cell in row] for row in drawn.topk_prompt_logprobs
        ],
    }


def main(scene_file, result_file):
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    asked = json.loads(Path(scene_file).read_text())
    scene = Scene(asked["model"])
    result = {
        "version": tinker.__version__,
        "figures": figures(scene),
        "lower": called_lower(scene),
        "commands": called_commands(scene, asked["not_called"], asked["key"]),
        "methods": called_methods(scene, asked["not_called"]),
    }
    Path(result_file).write_text(json.dumps(result, default=float))


if __name__ == "__main__":
    main(*sys.argv[1:])
