"""Cut the text of a label: the text that the metrics show of an owner also identifies the owner."""

from __future__ import annotations

import re

LABEL_VALUE_MAX = 256
"""Characters of a label value; a longer one is cut, so that no process name can make the page large."""

_SURROGATES = re.compile("[\ud800-\udfff]")


def label_text(text: str) -> str:
    """Cut a text to the maximum length of a label value, and replace what UTF-8 cannot encode."""
    if len(text) > LABEL_VALUE_MAX:
        text = text[: LABEL_VALUE_MAX - 1] + "…"
    return _SURROGATES.sub("\ufffd", text)
