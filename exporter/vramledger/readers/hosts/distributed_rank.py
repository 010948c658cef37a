"""Find which rank of which distributed job a process is, as its launcher wrote into its environment.

Only the rank, the number of ranks and the identity of the job leave this module. Nobody attests an
environment: who joins ranks of one job also compares what the kernel attests (the user, the namespace).
"""

from __future__ import annotations

from vramledger.agent_protocol import distributed_ranks
from vramledger.agent_protocol.distributed_ranks import LONGEST_VALUE, add_node
from vramledger.model.reading import Rank
from vramledger.printable import printable
from vramledger.readers.hosts.program_names import REPLACEMENT


def find_rank(environment: bytes, node: str) -> Rank | None:
    """Return the rank that an environment names; None where it names none, or a job of a single rank.

    Args:
        environment: begins with a zero byte.
        node: the name of this host, which tells a rendezvous on localhost from that of another host.
    """

    def value(name: str) -> str:
        mark = b"\0" + name.encode() + b"="
        begin = environment.find(mark)
        if begin < 0:
            return ""
        begin += len(mark)
        # Cut before searching for the end, and at four bytes a character at most.
        found = environment[begin : begin + 4 * LONGEST_VALUE].partition(b"\0")[0]
        return printable(found.decode(errors="replace"), REPLACEMENT)[:LONGEST_VALUE]

    found = distributed_ranks.find_rank(value)
    return None if found is None else Rank(*found[:2], add_node(found[2], node))
