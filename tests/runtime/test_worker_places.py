"""Where a worker looks for its coordinator: at one place after the other, until one says something that counts."""

from unittest.mock import Mock

import pytest

from spantrain.errors import PeerLostError, UsageError
from spantrain.runtime.worker import perform
from spantrain.runtime.worker import worker as workers
from spantrain.runtime.worker.perform import OrderRunner
from spantrain.runtime.worker.settings import WorkerSettings
from spantrain.runtime.worker.worker import Worker
from spantrain.transport.control.protocol import RemoteRefusal

SILENT, FOREIGN, REFUSED = (
    PeerLostError("nobody answers"),
    UsageError("another run"),
    RemoteRefusal("the name is taken"),
)
FIRST, SECOND = "10.0.0.1:7000", "10.0.0.2:7000"


@pytest.fixture
def asked(monkeypatch):
    """Answers by places, in turns; what was asked."""
    found: list[str] = []

    def asked(answers: dict[str, list[object]]) -> tuple[Worker, list[str]]:
        def join(place, *_, **__):
            found.append(place)
            answer = answers[place].pop(0) if len(answers[place]) > 1 else answers[place][0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(workers.ControlClient, "join", join)
        settings = WorkerSettings(join=FIRST, or_join=(SECOND,), token="t", name="a", backend="cpu")
        return Worker(settings), found

    return asked


@pytest.mark.parametrize("there", [SILENT, FOREIGN])
def test_it_looks_at_the_other_place_where_the_coordinator_is_not(asked, there):
    worker, found = asked({FIRST: [there], SECOND: [SILENT, "joined"]})
    assert worker._joined(30.0) == "joined"
    assert found == [FIRST, SECOND, FIRST, SECOND]


def test_what_the_coordinator_refuses_counts(asked):
    worker, found = asked({FIRST: [REFUSED], SECOND: ["joined"]})
    with pytest.raises(RemoteRefusal, match="the name is taken"):
        worker._joined(30.0)
    assert found == [FIRST]


def test_it_gives_up_when_the_time_is_over_or_no_place_is_its_runs(asked):
    worker, _ = asked({FIRST: [SILENT], SECOND: [SILENT]})
    with pytest.raises(PeerLostError, match="nobody answers"):
        worker._joined(0.0)
    worker, found = asked({FIRST: [FOREIGN], SECOND: [FOREIGN]})
    found.clear()
    with pytest.raises(UsageError, match="another run"):
        worker._joined(30.0)
    assert found == [FIRST, SECOND]


def test_who_holds_state_says_once_why_it_is_refused_and_goes_on_asking(monkeypatch, caplog):
    """As where another run's coordinator was started there by mistake, or one of other code."""
    answers = [REFUSED, REFUSED, FOREIGN, None]
    worker = Worker(WorkerSettings(join=FIRST, token="t", name="a", backend="cpu", keep_s=600.0))
    worker._name, worker._client, worker._orders, worker._control = "a", Mock(), Mock(), Mock()
    worker._mailbox = Mock()
    monkeypatch.setattr(workers, "_AGAIN_S", 0.0)
    monkeypatch.setattr(worker, "_join", Mock(side_effect=answers))
    worker._come_back(SILENT)
    assert worker._orders.control is worker._control
    told = [text for text in caplog.messages if "goes on asking" in text]
    assert told == ["a: the name is taken; it goes on asking", "a: another run; it goes on asking"]


def test_who_has_begun_its_part_of_a_run_comes_back_though_it_holds_nothing_yet(monkeypatch):
    """As while it loads what all begin with."""
    worker = Worker(WorkerSettings(join=FIRST, token="t", name="a", backend="cpu", keep_s=600.0))
    monkeypatch.setattr(perform, "session_of", Mock(side_effect=SILENT))
    runner = OrderRunner("a", worker._settings, control=Mock(), mailbox=Mock(), check_abort=Mock())
    worker._orders = runner
    assert not worker._keeps
    with pytest.raises(PeerLostError):
        runner._train(Mock(kept=None, journal_dir=""))
    assert runner.held is None
    assert worker._keeps


@pytest.mark.parametrize(
    ("data", "listen", "moved"),
    [
        ("192.0.2.7", "", ("127.0.0.1", "")),
        ("198.51.100.7", "192.0.2.7", ("198.51.100.7", "127.0.0.1")),  # behind address translation
        ("127.0.0.1", "", ("127.0.0.1", "")),
    ],
)
def test_who_comes_back_listens_anew_and_with_another_address_there(monkeypatch, data, listen, moved):
    worker = Worker(
        WorkerSettings(join=FIRST, token="t", name="a", backend="cpu", data_address=data, listen_address=listen)
    )
    before, opened = Mock(), Mock()
    worker._name, worker._client, worker._control = "a", Mock(address="127.0.0.1:7001"), Mock()
    worker._mailbox, worker._orders = before, Mock(mailbox=before)
    monkeypatch.setattr(worker, "_join", Mock())
    monkeypatch.setattr(workers, "Mailbox", opened)
    worker._come_back(SILENT)
    assert (worker._settings.data_address, worker._settings.listen_address) == moved
    assert opened.call_args.kwargs["bind"] == "tcp://127.0.0.1:0"
    assert before.close.called
    assert worker._orders.mailbox is worker._mailbox is opened.return_value
    assert moved == (data, listen) or worker._orders.settings is worker._settings
