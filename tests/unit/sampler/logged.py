"""Samples as a sampler logs them, in a list: ``Samples`` to replay from."""

from __future__ import annotations

import msgspec
from blake3 import blake3
from tests.unit.sampler.examples import prompt, sample
from tests.unit.sampler.oracles import adapter_files

from tinsmith import ids
from tinsmith.adapters import version_of
from tinsmith.errors import BlobMissing
from tinsmith.logbook.samples import StoredSample
from tinsmith.messages.base import BlobRef, decoder, encode
from tinsmith.messages.sampling import AdapterRef, SampleContent
from tinsmith.sealing import PLAIN
from tinsmith_sampler.answering import answer
from tinsmith_sampler.checks import Limits
from tinsmith_sampler.recording import record

SESSION = "a" * 26
MODEL = ids.model_id(SESSION, 0)
SAMPLER = ids.sampler_id(SESSION, 0)
_CONTENTS = decoder(SampleContent)


class Logged:
    """``Samples`` of one run, as which those from the base model count too."""

    def __init__(self, seal=PLAIN):
        self.records = []
        self.blobs = {}
        self._seal = seal

    async def count(self, run):
        return len(self.records)

    async def stored(self, run):
        for one in self.records:
            yield StoredSample.read(encode(one), run, "a place")

    async def blob(self, ref):
        if ref.blake3 not in self.blobs:
            raise BlobMissing(f"blob {ref.blake3} is not there")
        return self.blobs[ref.blake3]

    async def seal(self, run):
        return self._seal

    def adapter(self, folder):
        """The adapter in ``folder``, as a checkpoint of the run has it."""
        files = {}
        for name, data in adapter_files(folder).items():
            files[name] = BlobRef(blake3(data).hexdigest(), len(data))
            self.blobs[files[name].blake3] = data
        return AdapterRef(version=version_of(files), files=files, model_id=MODEL, op_seq=3)

    async def draw(self, engine, seq, *, adapter=None, has_content=True, params=None, **fields):
        """Answer a request on ``engine`` and log it."""
        if adapter is not None:
            files = {name: self.blobs[ref.blake3] for name, ref in adapter.files.items()}
            await engine.load_adapter(adapter.version, files)
        request = sample(
            request_id=ids.future_id(SAMPLER, seq), sampler_id=SAMPLER, seq=seq, adapter=adapter,
            params={"max_tokens": 6, "ignore_eos": True, "seed": seq, **(params or {})},
            **{"prompt": prompt(9, seed=seq), **fields},
        )  # fmt: skip
        limits = Limits(vocab_size=engine.vocab_size, context_length=engine.context_length)
        done = await answer(engine, request, limits)
        done = msgspec.structs.replace(done, sampler="s", environment=engine.environment)
        made = record(request, done, self._seal, has_content=has_content)
        self.records.append(msgspec.structs.replace(made, run=MODEL))

    def tamper(self, index, change):
        """Replace the content of a record by ``change`` of it; digests stay."""
        old = self.records[index]
        content = change(_CONTENTS.decode(self._seal.open(old.content)))
        new = self._seal.seal(encode(content))
        self.records[index] = msgspec.structs.replace(old, content=new)
