"""`omni-jax chat`: a conversation in the terminal."""

import contextlib
import shlex
import sys
from pathlib import Path
from typing import Any

from omni_jax.interrupts import leave_to_python
from serving.cli.generate import Sampling, check_sampling, cut_short, load_model, play, sampling_params
from serving.cli.options import Cache, Config, Encoder, LogLevel, Model, Parallel
from serving.cli.support import FAILURE, expected_errors, log_to_stderr, usage_error

EXAMPLE = 'omni-jax chat ~/models/SmolLM2-135M-Instruct --system "Answer in one sentence."'

HELP = """\
/image FILE [FILE ...]   add images to the next message
/video FILE [FILE ...]   add videos to the next message
/system TEXT             start again with this system prompt
/undo                    take back the last question and its answer
/clear                   forget the conversation
/help                    show this
/exit, /quit             leave (or Ctrl-D)"""


def chat(
    model: Path,
    /,
    *,
    system: str | None = None,
    config: Config = None,
    log_level: LogLevel = "warning",
    sampling: Sampling = None,
    model_settings: Model = None,
    cache: Cache = None,
    encoder: Encoder = None,
    parallel: Parallel = None,
) -> int:
    """Talk to a model in the terminal. /help lists what can be typed besides messages.

    Args:
        model: Model directory in Hugging Face layout, or the id of a repository of the Hugging Face hub.
        system: System prompt.
        config: JSON or YAML file of settings: flags by their names. Flags and variables override it.
        log_level: Least severe messages that are logged.
    """
    log_to_stderr(log_level)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  arrow keys and history in input()
    check_sampling(sampling)
    with load_model(model, model_settings, cache, encoder, parallel) as llm:
        if not llm.tokenizer.has_chat_template:
            usage_error(
                f"{model} has no chat template; `omni-jax generate {shlex.quote(str(model))} PROMPT` continues a text"
            )
        leave_to_python()  # Ctrl-C ends an answer, or an input
        params = sampling_params(llm, sampling)
        conversation = Conversation(system)
        code = 0
        print("/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves.", file=sys.stderr)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return code
            except KeyboardInterrupt:
                print()
                continue
            if line in ("/exit", "/quit"):
                return code
            if line.startswith(("/image", "/video")) and llm.engine.vision is None:
                print("this model reads text only", file=sys.stderr)
                continue
            if line.startswith("/"):
                print(conversation.command(line), file=sys.stderr)
                continue
            if line and not _answer(llm, params, conversation, line):
                code = FAILURE


def _answer(llm: Any, params: Any, conversation: "Conversation", text: str) -> bool:
    """Streams an answer, and says when it was cut. What was shown of it stays in the conversation when Ctrl-C
    stops it; a message that the model refuses does not. Returns whether the engine is well."""
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        print(piece, end="", flush=True)

    cut = None
    try:
        with contextlib.closing(llm.stream(conversation.ask(text), params)) as answer:
            cut = cut_short(llm, play(answer, show), params)
    except KeyboardInterrupt:
        cut = "stopped"
    except expected_errors() as error:
        conversation.undo()
        print(f"omni-jax: {error} (/clear forgets the conversation)", file=sys.stderr)
        from omni_jax.requests.errors import EngineError

        return not isinstance(error, EngineError)
    print()
    if cut is not None:
        print(f"[{cut}]", file=sys.stderr)
    conversation.messages.append({"role": "assistant", "content": "".join(pieces)})
    return True


class Conversation:
    """The messages so far, and the media that wait for the next one."""

    def __init__(self, system: str | None):
        self.media: list[dict[str, str]] = []
        self._start(system)

    def _start(self, system: str | None) -> None:
        self._system = system
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str) -> list[dict[str, Any]]:
        """Adds a question, with the media that wait. Returns all messages."""
        content = [*self.media, {"type": "text", "text": text}] if self.media else text
        self.media = []
        self.messages.append({"role": "user", "content": content})
        return self.messages

    def undo(self) -> bool:
        """Drops the last question and what follows it."""
        places = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        if places:
            del self.messages[places[-1] :]
        return bool(places)

    def command(self, line: str) -> str:
        """Carries out a line that begins with /. Returns what to show."""
        name, _, rest = line.partition(" ")
        if name in ("/image", "/video"):
            try:
                paths = [Path(word).expanduser() for word in shlex.split(rest)]
            except ValueError as error:  # a quote that is not closed
                return f"{error}: {rest}"
            missing = [str(path) for path in paths if not path.is_file()]
            if missing or not paths:
                return f"there is no file {', '.join(missing)}" if missing else f"{name} needs a file"
            kind = name[1:]
            self.media += [{"type": kind, kind: str(path)} for path in paths]
            return f"{len(self.media)} file(s) go with the next message"
        if name == "/system":
            self._start(rest.strip() or None)
            return f"started again with {'this' if rest.strip() else 'no'} system prompt"
        if name == "/clear":
            self.media = []
            self._start(self._system)
            return "forgot the conversation"
        if name == "/undo":
            return "took back the last question" if self.undo() else "there is nothing to take back"
        return HELP if name == "/help" else f"there is no {name}\n{HELP}"
