"""``tinsmith replay --sampling``: logged samples are drawn again, and every outcome compared.

log -> survey -> redrawing (base model, engine) -> replaying -> report
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from tinsmith.errors import InvalidRequest, NotFound
from tinsmith.logbook.replay_output import conclude, warn
from tinsmith.logbook.samples import open_samples
from tinsmith_sampler import replay_report

if TYPE_CHECKING:
    from tinsmith.cli.replay import Options
    from tinsmith.config import Config
    from tinsmith.logbook.samples import Samples
    from tinsmith_sampler.replay_report import Summary
    from tinsmith_sampler.replaying import Survey


def main(options: Options, config: Config) -> int:
    """Replay as ``options`` say, and print what was found; 0 when all is equal, else 1.

    Raises:
        TinsmithError: there is nothing that can be drawn again.
    """
    summary = asyncio.run(_replay(options, config))
    render = replay_report.to_json if options.is_json else replay_report.to_text
    return conclude(render(summary), is_equal=summary.divergence is None)


async def _replay(options: Options, config: Config) -> Summary:
    async with open_samples(options.target, config) as (samples, run):
        return await replay(run, samples, options, config)


async def replay(run: str, samples: Samples, options: Options, config: Config) -> Summary:
    """Replay the samples of ``run``, a whole model or session id; raises as ``main``."""
    # Here, as it imports torch: what is wrong with the request was told before that.
    from tinsmith_sampler.replaying import Choice, Replay, survey

    seed = secrets.randbits(32) if options.seed is None else options.seed
    choice = Choice(options.share, seed)
    surveyed = await survey(samples, run, choice)
    _require_content(run, surveyed)
    with replay_report.progress(surveyed.chosen) as on_sample:
        doing = Replay(
            samples,
            run,
            choice,
            tolerance=options.tolerance,
            on_sample=on_sample,
            on_doubt=warn,
        )
        findings = await doing.run(surveyed.settings, config)
    return replay_report.summarise(run, surveyed, choice, findings, options.tolerance)


def _require_content(run: str, surveyed: Survey) -> None:
    if not surveyed.samples:
        raise NotFound(
            f"samples: none of {run} is in the log: nothing was sampled, or sampler.log was off, "
            "or it is too long ago"
        )
    if surveyed.samples == surveyed.digest_only:
        raise InvalidRequest(
            f"samples: the {surveyed.samples} of {run} are logged by their digests only, so that "
            'none can be drawn again; set sampler.log = "full" to keep prompts and answers'
        )
