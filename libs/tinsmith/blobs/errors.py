"""What went wrong in a store, in words that fit on a line and give no credentials away."""

from __future__ import annotations

import errno
import os
import re

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

from tinsmith.errors import ServerError, StorageFull

MAX_TEXT = 500
_DEBUG = "\n\nDebug source"  # from here on obstore tells what only its authors need
_REQUEST = "Error performing"  # the path is told once before it
_XML = re.compile(r"<\?xml.*", re.DOTALL)  # may hold the access key, and what was signed
_CODE = re.compile(r"<Code>(\w+)</Code>")


def told(exc: BaseException) -> str:
    """The reason in ``exc``; of an answer in XML only its code."""
    text = str(exc).partition(_DEBUG)[0]
    text = text[max(text.find(_REQUEST), 0) :]
    code = _CODE.search(text)
    plain = _XML.sub(code[1] if code else "", text)
    return " ".join(plain.split()).rstrip(": ")[:MAX_TEXT] + _remedy(exc)


def _remedy(exc: BaseException) -> str:
    if isinstance(exc, (PermissionDeniedError, UnauthenticatedError)):
        return "; check blobs.access_key_id, blobs.secret_access_key and what the key may do"
    return ""


def write_error(exc: BaseException, where: str) -> ServerError:
    """Why ``where`` did not take something."""
    full = os.strerror(errno.ENOSPC)
    if full in str(exc):
        return StorageFull(
            f"blob store {where} is full ({full}); free space or move it, then retry"
        )
    return ServerError(f"blob store {where} cannot be written: {told(exc)}")
