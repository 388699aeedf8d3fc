"""Joining: processes join a running job between two steps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from os import PathLike
from typing import Any

from pipesched.elastic.newcomers import Newcomers, asked_to_join, publish
from pipesched.elastic.survivors import hosted_store
from pipesched.pipeline.plan_switch import weakly
from pipesched.pipeline.regrouping import NewGroup, Regrouping, SharedWork
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.pipeline.sent_values import learn_decided_types, learn_step_types
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.rank_host import RankHost
from pipesched.runtime.transport.ports import ConnectionLostError
from pipesched.saving.capturing import captured_here
from pipesched.saving.live_run import LiveRun

__all__ = ["Joining", "old_alarm_counts"]


class Joining:
    """Lets other processes join the job, and this process join another one.

    Args:
        running: the running plan; its contents are replaced.
        regrouping: lets another set of ranks run the pipeline.
        live_run: returns the state of the run under the running plan.
        finish_saves: waits for an asynchronous save, which a process that joins does not know.
        rendezvous: the file with the addresses of the job's ranks; None if none can join.
        sent_types: the types of values that only recoveries and searches send.

    """

    def __init__(
        self,
        *,
        running: RunningPlan,
        regrouping: Regrouping,
        live_run: Callable[[], LiveRun],
        finish_saves: Callable[[], None],
        rendezvous: str | PathLike[str] | None,
        sent_types: tuple[type, ...],
    ) -> None:
        self._running = running
        self._regrouping = regrouping
        self._live_run = weakly(live_run)
        self._finish_saves = weakly(finish_saves)
        self._rendezvous = rendezvous
        self._sent_types = sent_types
        self._newcomers = Newcomers()

    def num_waiting(self) -> int:
        """Return the number of processes that have asked this rank to let them join."""
        return len(self._newcomers.waiting)

    def welcome(self, connected: ConnectedRank) -> None:
        """Answer the processes that ask to join, from now on over the alarm of this rank."""
        connected.alarm.answer_with(self._newcomers.answer)
        if self._rendezvous is not None and connected.rank == 0:
            publish(self._rendezvous, connected.alarm.addresses)

    # ---- in the job ------------------------------------------------------------------------------------------------

    def num_ranks_with(self, count: int) -> int:
        """Return the number of ranks if ``count`` processes wait. Each replica gets equally many of them."""
        before = self._running.host.grid.num_processes
        num_replicas = len(self._running.host.grid.rows)
        return next((n for n in range(before + count, before, -1) if n % num_replicas == 0), before)

    def let_join(self, connected: ConnectedRank, num_ranks: int) -> None:
        """Let processes join, and give them layers. Collective over the job and the processes.

        Args:
            connected: this rank and its connections, which the call replaces.
            num_ranks: the number of ranks afterwards.

        Raises:
            ExecutionError: a process has ended meanwhile. The job's ranks recover as after a loss.

        """
        work, before, step = SharedWork.of(self._running), connected.num_ranks, self._running.step
        self._finish_saves()
        store: Any = None
        if connected.rank == 0:
            host, store = hosted_store(connected.store, connected.timeout_s)
        address = self._running.host.collectives.agreed(lambda: (host, store.port))
        parts = [*captured_here(self._live_run())]
        group = NewGroup(rank=connected.rank, num_ranks=num_ranks, host=address[0], port=address[1], step=step)
        if connected.rank == 0:
            self._accept(group, work, before)
        try:
            new = self._regrouping.connect(group, work, store, connected.encoding)
            with old_alarm_counts(new):
                self._regrouping.take_over(new, work, {rank: rank for rank in range(before)}, parts, step)
        except RuntimeError as error:  # such as a newcomer that has ended meanwhile
            with connected.stopping_all("letting a process join"):
                raise ConnectionLostError(str(error)) from error
        connected.survives = False
        connected.close()

    def _accept(self, group: NewGroup, work: SharedWork, before: int) -> None:
        """Tell as many newcomers as can join what they need."""
        common = {"work": asdict(work), "seed": self._running.seed, "form": self._regrouping.form.of_mesh}
        for rank, name in zip(range(before, group.num_ranks), self._newcomers.waiting, strict=False):
            self._newcomers.accept(name, {**common, "group": {**asdict(group), "rank": rank}})

    # ---- in a newcomer ---------------------------------------------------------------------------------------------

    def join(self) -> NewGroup:
        """Join a running job. This process has made its pipeline by itself so far.

        If the job loses a rank meanwhile, its ranks go on without this process, which then asks again.
        """
        assert self._rendezvous is not None  # was checked
        alone = self._running.host
        while True:
            found = asked_to_join(self._rendezvous, self._regrouping.form.timeout_s)
            try:
                group = self._join_as(found)
                break
            except RuntimeError:
                if self._running.host is not alone:
                    raise
        alone.close()
        return group

    def _join_as(self, found: Mapping[str, Any]) -> NewGroup:
        """Become the rank that the job's answer states."""
        self._regrouping.form = self._regrouping.form.like(found["form"])
        group, work = NewGroup(**found["group"]), SharedWork(**found["work"])
        self._running.seed = found["seed"]
        host = self._regrouping.connect(group, work, None, None)
        learn_decided_types(host.collectives, *self._sent_types)
        learn_step_types(host.collectives)
        with old_alarm_counts(host):
            self._regrouping.take_over(host, work, {}, [], group.step)
        return group


@contextmanager
def old_alarm_counts(host: RankHost) -> Iterator[None]:
    """A context in which the old alarm still counts: if it fails, the ranks agree anew over the old alarm.

    ``host`` has the new connections, which are given up.
    """
    try:
        yield
    except BaseException:
        assert host.maker is not None
        host.maker.connected.give_up()
        raise
