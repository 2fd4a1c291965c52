"""How long ranks take to agree on a report: each with messages of its own, and aggregated by machine.

    python tests/benchmarks/agreement.py [--ranks 16 100 1000 4000 10000] [--rounds 6] [--flat-up-to 4000] [--per-node 8]

The store of all ranks is a real TCPStore in a process of its own, as that of a leader, and rank 0 runs the real rounds of
reports, with a file a rank. The other ranks are played by three threads that send what each of them would send, look for the
decision as often as each would, and fetch it. With aggregation, the first and the last machine are whole: a TCPStore of their
own, and all of their ranks as threads with the ranks' own code (`Peers`). Of the other machines only the sender is played,
since their ranks meet on their own CPUs; the looks of all other ranks for lost ones are played, too.
When rank 0 begins a round, all others have been waiting for a while, as for the slowest rank.

    rank 0     from the beginning of its round to its decision
    last rank  to the arrival of the decision at the last sender, and, per node, the longest way from there to a neighbour that
               the whole machines had
    players    by how much they came too late for what they play at the most, in the middle of the rounds: if that is more than
               some milliseconds, this machine is too busy for the number of ranks

The fastest and the middle of the rounds after the first. Writes results/agreement.txt.
"""

import argparse
import heapq
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

from prefect_torch.ckpt.reporting.agreement import Intent, merge_intents
from prefect_torch.ckpt.reporting.background import BackgroundCommits
from prefect_torch.ckpt.reporting.exchange.exits import read_exits
from prefect_torch.ckpt.reporting.exchange.node import Node
from prefect_torch.ckpt.reporting.exchange.peers import Peers
from prefect_torch.ckpt.reporting.rounds import Rounds
from prefect_torch.tasks.rank.rendezvous import Address, Rendezvous, connect
from result_file import write_results

RANKS = [16, 100, 1000, 4000, 10_000]
THREADS = 3
PAUSE_S = 1.0
LOOKS_PER_S = 1000  # of all ranks that wait (reporting.exchange.peers)
LONGEST_POLL_S = 0.01  # a rank that waits looks so often at the least, or 20 times in the time between two looks for lost ranks


def serve():
    """Be the leader: serve a store until stdin ends."""
    rendezvous = Rendezvous()
    served = rendezvous.serve()
    print(rendezvous.address.port, flush=True)
    sys.stdin.read()
    os._exit(0 if served else 1)


def intent(rank, number):
    return Intent(rank, number, "sync", [f"model-{rank}.pt"]).encode()


class Players:
    """What other processes than rank 0's do in a training.

    Args:
        plan: The number of ranks and of rounds, the ports, and how many ranks share a machine (None for flat).

    """

    def __init__(self, plan):
        self.plan, self.rounds = plan, plan["rounds"]
        self.world_size, per_node = plan["world_size"], plan["per_node"]
        self.address = Address("127.0.0.1", plan["port"])
        self.got_s = [[0.0] for _ in range(self.rounds)]
        self.late_s = [[0.0] for _ in range(self.rounds)]
        self.whole_s = [[[] for _ in range(self.rounds)] for _ in plan["stores"]]
        firsts = range(0, self.world_size, per_node or 1)
        self.machines = [range(first, min(first + (per_node or 1), self.world_size)) for first in firsts]

    def run(self):
        own = {0, len(self.machines) - 1} if self.plan["stores"] else {0}
        played = [number for number in range(len(self.machines)) if number not in own]
        threads = [threading.Thread(target=self._play, args=(played[part::THREADS],)) for part in range(THREADS)]
        for place, (number, port) in enumerate(self.plan["stores"]):
            for rank in filter(None, self.machines[number]):
                node = Node(connect(Address("127.0.0.1", port)), number, len(self.machines), self.machines[number])
                peers = Peers(connect(self.address), rank, self.world_size, node)
                threads.append(threading.Thread(target=self._be, args=(peers, self.whole_s[place])))
        for thread in threads:
            thread.start()
        print("ready", flush=True)
        for thread in threads:
            thread.join()
        last_s = []
        for number in range(self.rounds):
            whole_s = [each[number] for each in self.whole_s]
            hop_s = max((max(got_s) - min(got_s) for got_s in whole_s), default=0.0)
            last_s.append(max(max(self.got_s[number]) + hop_s, *map(max, whole_s)) if whole_s else max(self.got_s[number]))
        print(json.dumps([last_s, list(map(max, self.late_s))]), flush=True)
        os._exit(0)

    def _be(self, peers, got_s):
        for number in range(self.rounds):
            topic = f"report {number + 1}"
            peers.exchange(topic, intent(peers.rank, number), merge=merge_intents)
            peers.decision(topic)
            got_s[number].append(time.monotonic())
            if number:
                peers.forget_message(f"report {number}")
                peers.forget_decision(f"report {number}")

    def _play(self, machines):
        key_value = connect(self.address)
        num_senders = len(self.machines)
        pause_s = max(LONGEST_POLL_S, max(0.2, num_senders / LOOKS_PER_S) / 20)
        looks_per_s = min(LOOKS_PER_S, 5 * self.world_size) / THREADS
        for number in range(self.rounds):
            for each in machines:
                ranks = self.machines[each]
                messages = [intent(rank, number) for rank in ranks]
                flat = self.plan["per_node"] is None
                name = f"{ranks[0]}" if flat else f"node {each}"
                key_value.set(f"report {number + 1}/{name}", messages[0] if flat else merge_intents(messages))
            decided = f"prefect-torch/report {number + 1}"
            begun_s, num_looks = time.monotonic(), 0
            due = [(begun_s + random.random() * pause_s, each) for each in machines]
            heapq.heapify(due)
            while due:
                at_s, each = due[0]
                now_s = time.monotonic()
                if now_s < at_s:
                    if num_looks < (now_s - begun_s) * looks_per_s:
                        read_exits(key_value)
                        num_looks += 1
                    else:
                        time.sleep(min(at_s - now_s, 0.001))
                elif key_value.store.check([decided]):
                    key_value.store.multi_get([decided])
                    heapq.heappop(due)
                    self.got_s[number].append(time.monotonic())
                    self.late_s[number].append(now_s - at_s)
                else:
                    heapq.heapreplace(due, (now_s + pause_s, each))


@contextmanager
def program(*arguments):
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.stdin.close()
            started.kill()


def agree(world_size, rounds, per_node):
    """Return, for each round but the first, the times of rank 0 and of the last rank, and how late the players were."""
    with ExitStack() as stack:
        port = int(stack.enter_context(program("--serve")).stdout.readline())
        key_value, node, stores = connect(Address("127.0.0.1", port)), None, []
        if per_node is not None:
            num_nodes = -(-world_size // per_node)
            own, last = Rendezvous(), Rendezvous()
            own_served, last_served = own.serve(), last.serve()
            stack.callback(lambda: last_served)  # it serves as long as there is a reference to it
            stores = [(0, own.address.port), (num_nodes - 1, last.address.port)]
            node = Node(own_served, 0, num_nodes, range(min(per_node, world_size)))
        plan = {"port": port, "world_size": world_size, "rounds": rounds, "per_node": per_node, "stores": stores}
        players = stack.enter_context(program("--play", json.dumps(plan)))
        assert players.stdout.readline() == "ready\n"
        rank_0 = Rounds(Peers(key_value, 0, world_size, node), 1, BackgroundCommits())
        begun_s, decided_s = [], []
        for number in range(rounds):
            time.sleep(PAUSE_S + world_size / 2000)
            begun_s.append(time.monotonic())
            agreement = rank_0.agree(Intent(0, number, "sync", ["model-0.pt"]), lambda: None)
            decided_s.append(time.monotonic())
            assert agreement.checkpoint_id is not None
        last_s, late_s = json.loads(players.stdout.readline())
    first = [decided - begun for decided, begun in zip(decided_s, begun_s, strict=True)]
    last = [got - begun for got, begun in zip(last_s, begun_s, strict=True)]
    return first[1:], last[1:], statistics.median(late_s[1:])


def row(name, world_size, first, last, late_s):
    def told(times):
        return f"{min(times) * 1e3:>7.0f} {statistics.median(times) * 1e3:>7.0f} ms"

    return f"{world_size:>6}  {name:<12} {told(first):>18}   {told(last):>19}   {late_s * 1e3:>7.0f} ms"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--flat-up-to", type=int, default=4000)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--play", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    if options.play:
        Players(json.loads(options.play)).run()
    lines = [f"{'ranks':>6}  {'':<12} {'rank 0: min, p50':>18}   {'last rank: min, p50':>19}   {'players':>10}"]
    for world_size in options.ranks:
        middle = []
        for name, per_node in (("flat", None), (f"{options.per_node} per node", options.per_node)):
            if per_node is None and world_size > options.flat_up_to:
                continue
            first, last, late_s = agree(world_size, options.rounds, per_node)
            middle.append([statistics.median(times) for times in (first, last)])
            lines.append(row(name, world_size, first, last, late_s))
            print(lines[-1], flush=True)
        if len(middle) == 2:
            shares = [node / flat for flat, node in zip(*middle, strict=True)]
            lines.append(f"{world_size:>6}  {'share':<12} {shares[0]:>15.2f}      {shares[1]:>16.2f}")
    if left := [str(number) for number in RANKS if number not in options.ranks]:
        lines.append(f"{', '.join(left)} ranks were left out here: they need an idle machine")
    write_results("agreement.txt", options.rounds - 1, lines)


if __name__ == "__main__":
    main()
