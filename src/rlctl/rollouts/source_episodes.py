"""The environments of a run's sources: each source has its own, shares one with others, or has none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.data.chat import PromptEncoder
from rlctl.data.mixing import errors_of_source
from rlctl.data.prompt_rows import PromptRow
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes, EpisodePlayer
from rlctl.rollouts.episodes import Episode, one_turn
from rlctl.settings.config import RolloutConfig
from rlctl.settings.rewards import EnvironmentConfig


@dataclass(frozen=True)
class SourceEpisodes:
    """Settings of a run's episodes by the label of their source. In an engine's process, `started` returns their
    player."""

    plays: Mapping[str, EnvironmentEpisodes]
    """Without the sources whose completions have one turn. Sources with equal settings share one."""

    @classmethod
    def open(
        cls, config: RolloutConfig, sources: Iterable[tuple[str, PromptEncoder, PromptRow]]
    ) -> SourceEpisodes | None:
        """Play a trial episode of each environment, on the first row of a source; None without environments. `sources`:
        (label, encoder, first row). Raises InputError if one fails."""
        environments, listed = config.environments, list(sources)
        if (
            config.data.sources and config.validation.wanted and config.validation.data.name
        ):  # rows of `validation.data` belong to no source
            environments |= {"": config.environment}
            listed.append(("", *listed[0][1:]))
        return cls.of_tasks(config, environments, listed)

    @classmethod
    def of_tasks(
        cls,
        config: RolloutConfig,
        environments: Mapping[str, EnvironmentConfig],
        sources: Iterable[tuple[str, PromptEncoder, PromptRow]],
    ) -> SourceEpisodes | None:
        """Play a trial episode of each of `environments`, as `open` does."""
        plays = dict[str, EnvironmentEpisodes]()
        for label, encoder, row in sources:
            limits = environments[label]
            play = next((play for play in plays.values() if play.limits == limits), None)
            with errors_of_source(label if label in config.data.source_labels else ""):
                play = play or EnvironmentEpisodes.open(config, encoder, row, limits)
            if play is not None:
                plays[label] = play
        return cls(plays) if plays else None

    def of(self, source: str) -> EnvironmentEpisodes | None:
        return self.plays.get(source)

    @property
    def every(self) -> tuple[EnvironmentEpisodes, ...]:
        """The environments, each once."""
        return tuple({id(play): play for play in self.plays.values()}.values())

    @property
    def _of_sources(self) -> Mapping[str, EnvironmentEpisodes]:
        """Without the environment of validation, if the sources have labels."""
        return {source: play for source, play in self.plays.items() if source or len(self.plays) == 1}

    @property
    def label(self) -> str:
        return ", ".join(dict.fromkeys(play.plan.label for play in self.every))

    @property
    def example(self) -> str:
        """A tool call in the template's form; empty: no tools, or an unknown form."""
        return next((play.example for play in self.every if play.example), "")

    def within(self, max_length: int) -> SourceEpisodes:
        """Return the settings for episodes of at most `max_length` tokens."""
        within = {id(play): play.within(max_length) for play in self.every}
        return SourceEpisodes({source: within[id(play)] for source, play in self.plays.items()})

    def manifest(self) -> dict[str, Any]:
        """Return the names, parameters and digests of the environments, by source if there are several."""
        manifests = {source: play.manifest() for source, play in self._of_sources.items()}
        return manifests.get("", manifests)

    def describe(self) -> list[str]:
        return [
            f"{source}: {line}" if source else line
            for source, play in self._of_sources.items()
            for line in play.describe()
        ]

    # In the process of an engine

    def started(self) -> SourcesPlayer:
        players = {id(play): play.started() for play in self.every}
        return SourcesPlayer({source: players[id(play)] for source, play in self.plays.items()})


class SourcesPlayer:
    """Plays the episodes of one engine, each in the environment of its source."""

    def __init__(self, players: Mapping[str, EpisodePlayer]) -> None:
        self._players = players

    async def __call__(self, episode: Episode) -> None:
        """Play an episode to its end. Requests without a row, such as those of refit checks, have one turn."""
        row = episode.request.row
        await (one_turn(episode) if row is None else self._players[row.source](episode))

    def close(self) -> None:
        for player in set(self._players.values()):
            player.close()
