"""What is known of a call when the server has gone: that it did not happen, or nothing."""

import asyncio

import pytest

from infra.redis import Client, connect
from infra.settings import RedisSettings
from ledger.functions.calls import LedgerUnavailable, LedgerUnreachable, call

GREETING = b"%1\r\n$5\r\nproto\r\n:3\r\n"


class Server:
    """Says yes to everything in Redis's words, until it leaves."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []
        self.silent = False

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"redis://{host}:{port}/0"

    async def leave(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        while data := await reader.read(1 << 16):
            if b"FCALL" in data:
                writer.write(b"" if self.silent else b"*2\r\n$2\r\nok\r\n$1\r\nm\r\n")
                if self.silent:
                    writer.close()
            else:
                asked = data.count(b"CLIENT") + data.count(b"SELECT")
                writer.write((GREETING if b"HELLO" in data else b"") + b"+OK\r\n" * asked)


def client_of(url: str) -> Client:
    return connect(RedisSettings(url=url, username="router", password="secret"))


async def test_an_idle_connection_whose_server_left_leaves_no_doubt() -> None:
    server = Server()
    async with client_of(await server.start()) as client:
        assert await call(client, "status", "m") == [b"ok", b"m"]
        await server.leave()
        with pytest.raises(LedgerUnreachable):
            await call(client, "status", "m")


async def test_a_server_that_leaves_with_the_question_leaves_a_doubt() -> None:
    server = Server()
    async with client_of(await server.start()) as client:
        server.silent = True
        with pytest.raises(LedgerUnavailable) as caught:
            await call(client, "status", "m")
        assert not isinstance(caught.value, LedgerUnreachable)
        await server.leave()
