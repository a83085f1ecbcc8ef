"""Messages of many mistakes, tried in one group of workers."""

from collections.abc import Callable, Mapping

import pytest

from allstep.errors import UsageError


def refused(call: Callable[[], object]) -> str:
    """What is said to a call that must be a mistake."""
    with pytest.raises(UsageError) as error:
        call()
    return str(error.value)


def check_messages(messages: Mapping[str, str], words: Mapping[str, str]) -> None:
    """Fails unless each mistake was told, in a message with its words."""
    assert messages.keys() == words.keys()
    for name, message in messages.items():
        assert words[name] in message, (name, message)
