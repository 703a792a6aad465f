"""Settings of HTTP services that score rows."""

import re
from urllib.parse import urlsplit

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from flowrl.config.base import Config


class ServiceConfig(Config):
    """An HTTP service that scores rows. docs/rewards.md describes requests and responses."""

    url: str
    """Address to which batches of rows are sent, such as `http://127.0.0.1:8000/score`."""

    batch_size: PositiveInt = 32
    """Largest number of rows of a request."""

    timeout_s: PositiveFloat = 30.0
    """Seconds for one request, from the connection to the last byte of the response."""

    deadline_s: PositiveFloat = 300.0
    """Seconds for all attempts of a batch, including the pauses between them. Then its rows have failed."""

    retries: NonNegativeInt = 5
    """Number of retries after a failed connection, a timeout, a malformed response, or status 408, 425, 429, 500, 502,
    503 or 504. Pauses grow exponentially, with jitter, and are at least as long as the header `Retry-After` requires.
    """

    max_concurrent: PositiveInt = 8
    """Largest number of concurrent requests."""

    token_variable: str | None = None
    """Name of the environment variable with a token, which is sent as `Authorization: Bearer TOKEN`."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not re.fullmatch(r"https?://[^\s/@]+(/\S*)?", url):
            raise ValueError(
                f"url is {url!r}, but must have the form http://HOST:PORT/PATH or https://HOST/PATH, without a password"
            )
        try:
            is_valid = urlsplit(url).port != 0
        except ValueError:  # a port that is no number or above 65535
            is_valid = False
        if not is_valid:
            raise ValueError(f"url is {url!r}, whose port is invalid: write a port from 1 to 65535, or none")
        return url
