"""The terminal of `flowrl chat`: reads messages and commands, and shows responses while they are generated."""

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.live import Live
from rich.table import Table
from rich.text import Text

from flowrl.config import UserError
from flowrl.data.console import make_console, printable, write_printable
from flowrl.inference.chat_session import ChatSession
from flowrl.run.interrupt import Interrupted

HELP = """\
/system TEXT        set the system message; without TEXT, remove it
/temperature T      set the temperature; 0 is greedy
/compare MODEL      also show the response of another model; without MODEL, stop
/retry              generate the last response again, with other random numbers
/undo               remove the last message and its response
/reset              remove all messages
/save FILE          write the conversation to a new file, one JSON line per model
/help               show this list
/exit               end the chat, like Ctrl-D
Ctrl-C stops a response. A message that begins with / is written with //.
"""

OpenSession = Callable[[str], ChatSession]
"""Opens a conversation with another model."""


class ChatTerminal:
    """Reads lines from standard input, and executes each as a command or sends it to the model."""

    def __init__(self, session: ChatSession, open_other: OpenSession) -> None:
        self._session, self._open_other = session, open_other
        self._other: ChatSession | None = None
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._console, self._notices = make_console(), make_console(stderr=True)
        self._num_retries = 0
        self._has_reported_rewrites = False
        self._commands: dict[str, Callable[[str], None]] = {
            "system": self._set_system,
            "temperature": self._set_temperature,
            "compare": self._compare,
            "retry": self._retry,
            "undo": self._undo,
            "reset": self._reset,
            "save": self._save,
            "help": lambda _: self._console.print(HELP, end="", markup=False, highlight=False),
        }

    def run(self) -> None:
        """Chats until /exit or the end of the input."""
        if self._is_terminal:
            import readline  # noqa: F401, PLC0415 (edits lines of `input`)

            self._notify(f"{self._session.generator.source.name} (/help lists the commands)")
        for line in self._lines():
            if line in ("/exit", "/quit"):
                return
            try:
                self._execute(line)
            except UserError as error:
                self._notify(f"error: {error}")
            except Interrupted:  # SIGTERM or SIGHUP
                raise
            except KeyboardInterrupt:  # before or after a response; during it, it only stops the response
                self._notify("interrupted")

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                line = input("> " if self._is_terminal else "")
            except Interrupted:  # SIGTERM or SIGHUP
                raise
            except KeyboardInterrupt:
                self._notify("\n/exit or Ctrl-D ends the chat")
                continue
            except EOFError:
                if self._is_terminal:
                    self._console.print()
                return
            except UnicodeDecodeError as error:
                self._notify(f"error: the line is not UTF-8 text ({error.reason}): write it again")
                continue
            if line.strip():
                yield line.strip()

    def _execute(self, line: str) -> None:
        if not line.startswith("/") or line.startswith("//"):
            self._num_retries = 0
            self._respond(line.removeprefix("/") if line.startswith("//") else line)
            return
        name, _, argument = line[1:].partition(" ")
        if name not in self._commands:
            names = ", ".join(f"/{known}" for known in (*self._commands, "exit"))
            raise UserError(f"unknown command /{name}; available: {names}; // begins a message with /")
        self._commands[name](argument.strip())

    def _notify(self, message: str) -> None:
        self._notices.print(Text(message), style="dim" if self._is_terminal else "", soft_wrap=True)

    @property
    def _sessions(self) -> list[ChatSession]:
        return [self._session] if self._other is None else [self._session, self._other]

    # Commands.

    def _set_system(self, text: str) -> None:
        for session in self._sessions:
            session.system = text or None
        self._notify("system message set" if text else "system message removed")

    def _set_temperature(self, text: str) -> None:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise UserError(f"/temperature {text!r} is not a number of at least 0, like 0.7")
        for session in self._sessions:
            session.generator.check_temperature(value)
        for session in self._sessions:
            session.temperature = value
        self._notify(f"temperature {value:g}")

    def _compare(self, model: str) -> None:
        if not model:
            if self._other is None:
                raise UserError("/compare needs a model: write its folder, such as /compare runs/other")
            self._other = None
            self._notify("responses of one model")
            return
        other = self._open_other(model)
        other.system, other.temperature = self._session.system, self._session.temperature
        other.copy_turns(self._session)
        self._other = other
        self._notify(f"responses of {self._session.generator.source.name} and {other.generator.source.name}")

    def _retry(self, _: str) -> None:
        if not self._session.turns:
            raise UserError("/retry needs a response: write a message first")
        prompts = [session.undo() for session in self._sessions]
        prompt = prompts[0]
        assert prompt is not None
        self._num_retries += 1
        self._respond(prompt)

    def _undo(self, _: str) -> None:
        prompts = [session.undo() for session in self._sessions]
        if prompts[0] is None:
            raise UserError("/undo needs a message: there is none")
        self._notify(f"removed: {prompts[0]}")

    def _reset(self, _: str) -> None:
        for session in self._sessions:
            session.reset()
        self._notify("removed all messages")

    def _save(self, name: str) -> None:
        if not name:
            raise UserError("/save needs a file: write its name, such as /save chat.jsonl")
        rows = [
            {"model": session.generator.source.name, "messages": [asdict(message) for message in session.messages]}
            for session in self._sessions
        ]
        try:
            with Path(name).open("x", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        except FileExistsError as error:
            raise UserError(f"/save: {name} already exists: choose another file") from error
        except OSError as error:
            raise UserError(f"/save: {name} cannot be written ({error.strerror}): choose another file") from error
        self._notify(f"saved {name}")

    # Responses.

    def _respond(self, prompt: str) -> None:
        num_turns = len(self._session.turns)
        try:
            with stop_on_interrupt() as is_interrupted:
                if self._other is None:
                    self._stream(self._session, prompt, is_interrupted)
                else:
                    self._stream_columns(self._session, self._other, prompt, is_interrupted)
        except UserError:
            if len(self._session.turns) > num_turns:  # only the second model rejects the conversation
                self._session.undo()
            raise
        for session in self._sessions:
            self._report_end(session)

    def _stream(self, session: ChatSession, prompt: str, is_interrupted: Callable[[], bool]) -> None:
        shown = ""
        for state in session.respond(prompt, sample=self._num_retries, is_interrupted=is_interrupted):
            self._write(state.text[len(shown) :])
            shown = state.text
        self._write("\n")

    def _write(self, text: str) -> None:
        write_printable(text)
        sys.stdout.flush()

    def _stream_columns(
        self, first: ChatSession, second: ChatSession, prompt: str, is_interrupted: Callable[[], bool]
    ) -> None:
        texts = ["", ""]

        def columns() -> Table:
            table = Table(expand=self._is_terminal, show_lines=False)
            for session in (first, second):
                table.add_column(Text(session.generator.source.name), ratio=1, overflow="fold")
            table.add_row(*(Text(printable(text)) for text in texts))
            return table

        if not self._is_terminal:
            for i, session in enumerate((first, second)):
                for state in session.respond(prompt, sample=self._num_retries, is_interrupted=is_interrupted):
                    texts[i] = state.text
                self._write(f"{session.generator.source.name}: {texts[i]}\n")
            return
        with Live(columns(), console=self._console, refresh_per_second=10, vertical_overflow="visible") as live:
            for i, session in enumerate((first, second)):
                for state in session.respond(prompt, sample=self._num_retries, is_interrupted=is_interrupted):
                    texts[i] = state.text
                    live.update(columns())

    def _report_end(self, session: ChatSession) -> None:
        """Explains a response that did not end by itself, and a template that rewrites turns."""
        name = f"{session.generator.source.name}: " if self._other is not None else ""
        reason = session.turns[-1].response.finish_reason
        if reason == "interrupted":
            self._notify(f"{name}stopped")
        elif reason == "length" and session.is_full():
            limit = session.generator.max_length
            self._notify(
                f"{name}the conversation has reached the model's limit of {limit:,} tokens: shorten it with /undo, or "
                f"start again with /reset"
            )
        elif reason == "length":
            self._notify(f"{name}the response ended at --max-tokens")
        if session.rewrites_turns and not self._has_reported_rewrites:
            self._has_reported_rewrites = True
            self._notify("the chat template changes earlier responses, so each message tokenizes them again")


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether SIGINT has arrived in the block. The signal would otherwise raise an
    exception in the middle of a decode step, and leave the engine in an inconsistent state.
    """
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)
