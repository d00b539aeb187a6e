"""Calls that share a connection, against a server that is told what to say."""

import asyncio
import socketserver
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as NoAnswer

from infra.lane import Lane
from infra.redis import Client, connect
from infra.settings import RedisSettings

ANSWER_S = 0.3


class Server(socketserver.ThreadingTCPServer):
    """Answers ECHO with its word, in threads of its own, and counts its connections. Some words ask for more."""

    daemon_threads = True
    connections = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Talk)
        self.url = f"redis://127.0.0.1:{self.server_address[1]}/0"


class Talk(socketserver.StreamRequestHandler):
    """One connection: what it was asked, in order, until it is told to be silent or to leave."""

    server: Server
    silent = False

    def handle(self) -> None:
        self.server.connections += 1
        while (header := self.rfile.readline()).startswith(b"*"):
            command, *words = [self._word() for _ in range(int(header[1:]))]
            if words == [b"leave"]:
                return
            self.silent |= words == [b"say nothing"]
            if not self.silent:
                self.wfile.write(answer_to(command, words))

    def _word(self) -> bytes:
        length = int(self.rfile.readline()[1:])
        return self.rfile.read(length + 2)[:-2]


def answer_to(command: bytes, words: list[bytes]) -> bytes:
    match command, words:
        case b"HELLO", _:
            return b"%1\r\n$5\r\nproto\r\n:3\r\n"
        case b"ECHO", [b"refuse"]:
            return b"-ERR no\r\n"
        case b"ECHO", [word]:
            return b"$%d\r\n%s\r\n" % (len(word), word)
    return b"+OK\r\n"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with connect(RedisSettings(url=server.url, username="router", password="secret")) as client:
        client.lane = Lane(client.connection_pool, ANSWER_S)
        yield client


async def echo(client: Client, *words: str) -> list[object]:
    return list(await asyncio.gather(*(client.lane.call("ECHO", word) for word in words)))


async def test_calls_share_a_connection_and_each_gets_its_own_answer(server: Server, client: Client) -> None:
    words = [f"word {number}" for number in range(500)]
    assert await echo(client, *words) == [word.encode() for word in words]
    assert server.connections == 1


async def test_a_refused_call_is_refused_alone(client: Client) -> None:
    before, refused, after = await echo(client, "one", "refuse", "two")
    assert (before, after) == (b"one", b"two")
    assert isinstance(refused, ResponseError)


async def test_a_cancelled_caller_hands_its_answer_to_nobody(client: Client) -> None:
    calls = [asyncio.create_task(client.lane.call("ECHO", f"word {number}")) for number in range(6)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    assert await asyncio.gather(*calls[1::2]) == [b"word 1", b"word 3", b"word 5"]
    assert await echo(client, "next") == [b"next"]


async def test_what_waits_behind_a_silence_is_in_doubt_and_the_next_call_connects_anew(
    server: Server, client: Client
) -> None:
    told = await echo(client, "say nothing", "behind")
    assert [type(answer) for answer in told] == [NoAnswer, NoAnswer]
    assert await echo(client, "again") == [b"again"]
    assert server.connections == 2


async def test_a_server_that_leaves_is_told_to_all_that_wait(server: Server, client: Client) -> None:
    told = await echo(client, "leave", "behind")
    assert [type(answer) for answer in told] == [NoConnection, NoConnection]
    assert await echo(client, "again") == [b"again"]
    assert server.connections == 2


async def test_answers_that_came_while_the_process_stood_still_are_read(client: Client) -> None:
    await echo(client, "connected")
    # Just behind the sending, for longer than an answer may take.
    asyncio.get_running_loop().call_later(0.001, time.sleep, 2 * ANSWER_S)
    assert await echo(client, "one", "two") == [b"one", b"two"]


async def test_a_closed_client_tells_those_that_wait(client: Client) -> None:
    waiting = asyncio.create_task(client.lane.call("ECHO", "say nothing"))
    await asyncio.sleep(0)
    await client.aclose()
    assert isinstance(await waiting, NoConnection)
