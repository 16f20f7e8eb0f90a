"""Text of unknown origin (ids, paths, keys, names of models, answers, messages of other programs)
as it may be shown: what would move a terminal's cursor, colour it, write into its title or turn the
direction of what follows is an escape that is read, not obeyed."""

import re

# C0 controls but tab and newline, DEL and C1 controls, what turns the direction of text or hides in
# it, line separators, lone surrogates, non-characters, tags
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U000e0000-\U000e007f]")


def visible(text: str) -> str:
    """`text` with escapes (\\\\x1b) in the place of such characters; lines stay lines."""
    return _UNPRINTABLE.sub(_escaped, text.replace("\r\n", "\n"))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found.group())
    return (f"\\x{code:02x}" if code < 0x100 else
            f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
