import pytest

from openrl.app.settings import AppSettings


def test_an_empty_environment_gives_the_defaults() -> None:
    assert AppSettings.from_env({}) == AppSettings()


def test_each_setting_is_read_from_its_variable() -> None:
    read = AppSettings.from_env(
        {"OPENRL_HOST": "::1", "OPENRL_PORT": "9", "OPENRL_POLL_MIN_S": "1.5", "OPENRL_PARALLEL_FWDBWD_CHUNKS": "off"}
    )
    assert (read.host, read.port, read.poll_min_s, read.parallel_fwdbwd_chunks) == ("::1", 9, 1.5, False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OPENRL_PORT", "eighty"),
        ("OPENRL_PORT", "99999"),
        ("OPENRL_API_WORKERS", "0"),
        ("OPENRL_PROTO_COMPRESS_FWDBWD", "maybe"),
        ("OPENRL_POLL_MIN_S", "99"),
        ("OPENRL_PUBLIC_URL", "openrl.example"),
        ("OPENRL_PUBLIC_URL", "https://openrl.example/?x=1"),
        ("OPENRL_DOWNLOAD_LINK_TTL_S", "0"),
        ("OPENRL_CUSTOM_LOSS_SERVER_SIDE", "true"),
    ],
)
def test_nonsense_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name):
        AppSettings.from_env({name: text})
