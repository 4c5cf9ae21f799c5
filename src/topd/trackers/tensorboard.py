"""TensorBoard: event files in the run folder's trackers/tensorboard. Needs neither torch nor TensorFlow."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from topd.trackers.tracker import Start, Tracker
from topd.trackers.values import Table, flat


class Run(Tracker):
    REWINDS = True
    run_id = "events"

    @staticmethod
    def where(folder: Path) -> str:
        return "events"

    def __init__(self, start: Start) -> None:
        self._writer = EventFileWriter(str(start.folder))
        self._step = start.steps_done
        if start.run_id is not None:  # readers drop what they have at and after this step
            self._add(start.steps_done + 1, session_log=SessionLog(status=SessionLog.START))
        config = Table(("key", "value"), tuple((key, json.dumps(value)) for key, value in flat(start.config).items()))
        self._text(start.steps_done, "config", config.markdown())
        environment = Table(("key", "value"), tuple((k, json.dumps(v)) for k, v in flat(start.environment).items()))
        self._text(start.steps_done, "environment", environment.markdown())

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._step = step
        self._add(step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=x) for tag, x in numbers.items()]))
        self._writer.flush()

    def summarise(self, step: int, numbers: Mapping[str, float], table: Table) -> None:
        self.log(step, numbers)
        self._text(step, "final", table.markdown())

    def finish(self, status: str) -> None:
        self._text(self._step, "status", status)
        self._writer.close()

    def _text(self, step: int, tag: str, text: str) -> None:
        """A page of markdown, as the text plugin shows it."""
        plugin = SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        value = Summary.Value(tag=f"{tag}/text_summary", metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
        self._add(step, summary=Summary(value=[value]))
        self._writer.flush()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))
