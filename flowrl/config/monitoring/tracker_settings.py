"""Settings of trackers, which show the metrics of several runs in a browser."""

from typing import Annotated, Literal

from pydantic import Field

from flowrl.config.base import ImportName, Member, OneOf, Options


class TrackerConfig(Member):
    """Base class of the settings of a tracker. The class of the tracker receives them as keyword arguments."""

    NOUN = "a tracker"

    kind: str
    """Name of the tracker, or a user's class `module:Class` (docs/extend.md)."""


class ProjectTrackerConfig(TrackerConfig):
    """Base class of the settings of a tracker that has projects."""

    project: Annotated[str, Field(min_length=1)] = "flowrl"
    """Project in which the tracker shows the run."""

    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the run. Null uses the name of the output folder."""


class WandbConfig(ProjectTrackerConfig):
    """Weights & Biases. Requires the extra `wandb`."""

    kind: Literal["wandb"] = "wandb"

    entity: str | None = None
    """User or team that owns the project. Null uses the default of the account."""

    group: str | None = None
    """Group of runs to which the run belongs."""

    mode: Literal["online", "offline"] = "online"
    """`online`: sends the metrics during the run, and requires an API key. `offline`: writes them to the folder
    `wandb/` of the output folder, from where `wandb sync` sends them.
    """


class TrackioConfig(ProjectTrackerConfig):
    """Trackio, which stores metrics in a local database. Requires the extra `trackio`."""

    kind: Literal["trackio"] = "trackio"

    space_id: str | None = None
    """Space of the Hugging Face Hub to which the metrics are sent. Null stores them on this machine, where
    `trackio show` opens them.
    """


class CustomTracker(TrackerConfig):
    """A user's class `module:Class` (docs/extend.md)."""

    kind: ImportName
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the class."""


AnyTracker = Annotated[WandbConfig | TrackioConfig | CustomTracker, OneOf(allows_bare_name=True)]
