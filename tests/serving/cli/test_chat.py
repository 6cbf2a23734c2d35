"""A conversation in the terminal."""

import pytest

from omni_jax.requests import InvalidRequest
from serving.cli.chat import Conversation


def roles(messages) -> list[str]:
    return [message["role"] for message in messages]


def test_a_conversation_keeps_its_history(invoke, llm, tmp_path):
    result = invoke(
        "chat", tmp_path, "--system", "be brief", "--temperature", "0", stdin="hello\n\nand then?\n/exit\nno\n"
    )
    assert result.exit_code == 0, result.output
    messages, params = llm.asked
    assert roles(messages) == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in messages[1:]] == ["hello", "one two", "and then?", "one two"]
    assert (params.temperature, params.top_k) == (0, 7)
    assert result.stdout.count("one two\n") == 2
    assert llm.closed


def test_the_end_of_input_leaves(invoke, llm, tmp_path):
    assert invoke("chat", tmp_path, stdin="hello\n").exit_code == 0


def test_a_message_that_is_refused_is_taken_back(invoke, llm, tmp_path, monkeypatch):
    def refuses(self, messages, params):
        raise InvalidRequest("the prompt is too long")

    monkeypatch.setattr(llm, "stream", refuses)
    seen = []
    monkeypatch.setattr(Conversation, "undo", lambda self: seen.append(roles(self.messages)))
    result = invoke("chat", tmp_path, stdin="hello\n")
    assert (result.exit_code, seen) == (0, [["user"]])
    assert "omni-jax: the prompt is too long" in result.stderr


def test_ctrl_c_keeps_what_was_shown(invoke, llm, tmp_path, monkeypatch):
    def interrupted(self, messages, params):
        llm.asked = messages, params
        yield "half"
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "stream", interrupted)
    assert invoke("chat", tmp_path, stdin="hello\n").exit_code == 0
    assert llm.asked[0][-1] == {"role": "assistant", "content": "half"}


def test_settings_that_are_wrong_are_known_before_the_model_is_loaded(invoke, llm, tmp_path):
    llm.made = None
    result = invoke("chat", tmp_path, "--temperature", "9")
    assert (result.exit_code, llm.made) == (2, None)
    assert "temperature must be" in result.stderr


def test_media_go_with_the_next_message(tmp_path):
    (tmp_path / "a b.png").write_bytes(b"")
    path = str(tmp_path / "a b.png")
    conversation = Conversation(None)
    assert "1 file(s)" in conversation.command(f"/image '{path}'")
    content = conversation.ask("What is it?")[0]["content"]
    assert content == [{"type": "image", "image": path}, {"type": "text", "text": "What is it?"}]
    assert conversation.ask("And now?")[1]["content"] == "And now?"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("/image", "/image needs a file"),
        ("/video none.mp4", "there is no file none.mp4"),
        ("/image 'a", "No closing quotation"),
        ("/undo", "nothing to take back"),
        ("/help", "/image FILE"),
        ("/nothing", "there is no /nothing"),
    ],
)
def test_commands_say_what_is_wrong(line, shown):
    assert shown in Conversation(None).command(line)


def test_media_for_a_model_of_text(invoke, llm, tmp_path):
    assert "this model reads text only" in invoke("chat", tmp_path, stdin="/image a.png\n/quit\n").stderr


def test_undo_clear_and_system():
    conversation = Conversation("be brief")
    conversation.ask("one")
    conversation.messages.append({"role": "assistant", "content": "two"})
    conversation.ask("three")
    conversation.command("/undo")
    assert roles(conversation.messages) == ["system", "user", "assistant"]
    conversation.command("/clear")
    assert roles(conversation.messages) == ["system"]
    conversation.command("/system be long")
    assert conversation.messages == [{"role": "system", "content": "be long"}]
