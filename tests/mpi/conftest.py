import pytest

pytest.importorskip("torch", reason="ranks need the extra `run`")

import toys  # noqa: E402


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """(directory, transformers' model)"""
    directory = tmp_path_factory.mktemp("llama")
    return directory, toys.make_model("llama", directory)
