"""The text of the project is plain English: phrases that were replaced do not come back."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = (
    "exporter/vramledger/**/* exporter/docs/*.md exporter/docs/measurements/*.md exporter/docs/metrics/*.md"
    " exporter/docs/src/* alerts/*.md alerts/*.yml alerts/src/* alerts/templates/* alerts/runbooks/*.md"
    " dashboards/README.md dashboards/src/* deploy/**/* CONTRIBUTING.md README.md SECURITY.md"
).split()
"""The text that people read; generated files repeat it."""

SUFFIXES = {".py", ".md", ".yml", ".yaml", ".js", ".html", ".json", ".tmpl", ".sh", ".service", ".socket"}

PHRASES = {
    r"(?<!there )\b(?:is|are) no (?!longer\b|more\b)[a-z]+": "is not a …",
    r"\banew\b|\bafresh\b": "again, or a new one",
    r"\bin vain\b": "without success; failed",
    r"\bfares?\b": "the status of",
    r"\bat the (?:most|least)\b": "at most; at least; the minimum",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\baccount book\b|\bthe books?\b": "the ledger",
    r"\bnobody's\b": "unowned; without an owner",
    r"\bcourse of (?:its|the) bytes\b": "memory pattern",
    r"\bg[ai]ve[sn]? (?:\w+ ){0,2}back\b": "free, freed",
    r"\blet(?:s|ting)? go of\b": "release",
    r"\btak(?:e|es|en|ing) (?:the gpus|them|it) back\b": "reopen",
    r"\bsign of somebody|signs? of work for somebody\b": "worker evidence",
    r"\bgets? out of memory\b": "runs out of memory",
    r"\bsamples no more\b|\breports no more\b": "has stopped sampling; has stopped reporting",
    r"\bdoes not answer for (?:a|\d+) minutes?\b": "has not answered for 1 minute",
    r"\bcannot scrape \w+ since\b": "has not been able to scrape … since",
    r"\bthe memory is with\b": "largest holders:",
    r"\bact now:|\bfigures: \{": "PAGE:; Graph:",
    r"(?:^|[.:] )(?:does|should|were|had) [^.?:]{3,80}, (?:it|this|that|the) ": "If …",
    r"\b(?:for|from|of|to) who (?:has|asks|is|takes|may|answers)\b": "for the client that …; its owner",
    r"\bheld by who\b|\bnobody works with\b": "Share in active use; unused",
    r"\bby how loud\b": "by severity",
    r"\bgpus that answer\b": "GPUs reachable",
    r"\bwho wastes\b": "Waste by owner",
    r"\bcame and went\b": "Processes started and ended",
    r"\btake all at once\b": "Preallocated pools",
    r"\bfloor of what\b": "Minimum demand",
    r"\bheld down\b|\bhold(?:s)? the clocks down\b": "Clock throttling; throttles the clocks",
    r"\bnot let in\b": "rejected",
    r"\bknown of the fleet\b": "fleet totals exclude it",
    r"\bso many \w+ in so many\b": "at most 20 … in 300 s",
    r"\b(?:cannot|to|could) be had\b": "is (not) available",
    r"\bas ever\b": "as usual",
    r"\bunder our hands\b": "while we read",
    r"\btold apart\b": "distinguished from",
    r"\ba defect of\b": "a bug of",
    r"\bnone to be seen\b": "none visible",
    r"\bgiv(?:e|es|en|ing) (?:\w+ )?away\b": "assign (a scheduler); reveal",
    r"\bsteer(?:s|ing)?\b": "control",
    r"\bwhoever\b.*\bwhoever\b": "one clause for one client",
    r"\"\"\"the most [a-z]+ (?:of|that|from|in|whose)\b": "The maximum number of",
    r"\bin one go\b": "at once",
    r"\bcomes? off\b|\btakes? (?:it|them|\S+_bytes`) off\b": "is subtracted from",
    r"\bbooked\b|\bbooks (?:its|their|it|what)\b": "counted for; charged to",
    r"\bat first sight\b": "when first seen",
    r"\bnow and then\b|\bonce in a while\b": "from time to time; every … seconds",
    r"\bbelieve[sd]?\b": "trusted; ignored",
    r"\b(?:be|is|are|was) told (?:from|to|what|how|so|by|in)\b": "distinguished from; gets; is reported",
    r"\b(?:left|leaves?|leaving) (?:\w+ )?alone\b": "is not ended; is not changed",
    r"\b(?:kernel|agent|program|driver)'s (?:own )?word\b": "the kernel says; the program names",
    r"\b(?:the|what) .{0,30}\bthe most that\b": "the highest; the maximum that",
    r"\bdifference to `": "the difference between … and …",
    r"\bstands? still\b|\bstood still\b": "is stopped",
    r"\bmakes? no sense\b": "is invalid",
    r"\breckon\w*\b": "calculate; extrapolate",
    r"\bculprit\b": "the code that took the memory",
    r"\bfor good\b": "for ever; permanently",
    r"\bcom(?:e|es|ing) to rest\b": "does not change any more",
    r"\bround after round\b": "in rounds",
    r"\b(?:keep|keeps|kept) (?:\w+ ){1,4}(?:from being|from getting)\b": "prevent; block",
    r"\bof which it is (?:not )?(?:proven|seen|known)\b": "if it is proven or seen that …",
    r"\bprocessor time\b": "CPU time",
    r"\bnobody (?:tells|is told|has to be told)\b": "no event says; without a message",
}
"""The replaced phrases, as regular expressions of lower case, and the better wording."""

_PROSE = re.compile(r'"""(?:[^\\]|\\.)*?"""|(?:^|[ \t])#[ :].*?$', re.MULTILINE | re.DOTALL)
"""The docstrings and comments of a Python file, and its texts of several lines."""

_LINE_START = re.compile(r"\n[ \t]*(?:#|//|\*)?[ \t]*")


def texts() -> dict[Path, str]:
    """Return every file of the text by its path, in lower case, as one line: a phrase may be wrapped."""
    found = sorted({path for place in PLACES for path in ROOT.glob(place) if path.suffix in SUFFIXES})
    files = [path.relative_to(ROOT) for path in found if path.is_file()]
    text = {path: _LINE_START.sub(" ", (ROOT / path).read_text(encoding="utf-8")) for path in files}
    for path in sorted((ROOT / "tests").rglob("*.py")):  # their code may use any name
        if path != Path(__file__):
            prose = _PROSE.findall(path.read_text(encoding="utf-8"))
            text[path.relative_to(ROOT)] = "\n".join(" ".join(each.split()) for each in prose)
    return {path: each.lower() for path, each in text.items()}


def test_a_replaced_phrase_does_not_come_back() -> None:
    """No text has one of the phrases; the message says where it is, and what to write."""
    # All that begin with a letter in one search: where no word begins, none of them is tried.
    words = [phrase for phrase in PHRASES if phrase.startswith(r"\b")]
    searches = [rf"\b(?=[a-z])(?:{'|'.join(words)})", *(each for each in PHRASES if each not in words)]
    hits = [
        f"{path}: …{text[max(0, hit.start() - 40) : hit.end() + 40]}…; write: "
        f"{[better for phrase, better in PHRASES.items() if re.search(phrase, hit[0])]}"
        for path, text in texts().items()
        for pattern in map(re.compile, searches)
        for hit in pattern.finditer(text)
    ]
    assert hits == []
