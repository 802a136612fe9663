"""`python naive_loop.py LIBRARY BASE_URL REPOSITORIES TIMEOUT`: indexes repositories one after another with the library's
embedding class and its defaults, as an indexing script does: a failed repository is reported, and the next one is
tried. Runs in its own virtual environment and imports nothing of this project.
"""

import sys
from collections.abc import Callable

Embed = Callable[[list[str]], object]


def main() -> None:
    library, base_url, repositories, timeout = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    embed = {"langchain": langchain, "llamaindex": llamaindex}[library](base_url, timeout)
    print("started", flush=True)
    for number in range(repositories):
        try:
            embed([f"repository {number}, text {text}" for text in range(32)])
        except Exception as error:  # An indexing script goes on after any error.
            print(f"repository {number}: {type(error).__name__}", flush=True)


def langchain(base_url: str, timeout: float) -> Embed:
    from langchain_openai import OpenAIEmbeddings

    # Without the length check, which would download a tokenizer for an unknown model.
    embed: Embed = OpenAIEmbeddings(
        model="embed", base_url=base_url, api_key="none", timeout=timeout, check_embedding_ctx_length=False
    ).embed_documents
    return embed


def llamaindex(base_url: str, timeout: float) -> Embed:
    from llama_index.embeddings.openai import OpenAIEmbedding

    embed: Embed = OpenAIEmbedding(
        model_name="embed", api_base=base_url, api_key="none", timeout=timeout
    ).get_text_embedding_batch
    return embed


if __name__ == "__main__":
    main()
