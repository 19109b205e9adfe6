"""The API key that a request presents."""

from __future__ import annotations

from aiohttp import web

from tinsmith_gateway import responses
from tinsmith_gateway.middleware import OWNER


async def get_own_key(request: web.Request) -> web.Response:
    """What is known of the key: its owner's id; a key has no name and no address here."""
    owner = request[OWNER]
    return responses.of_json(
        {
            "key_id": int(owner[:12], 16),  # clients take a number; 48 bits are exact in JSON
            "name": owner,
            "note": "",
            "details": {"org_details": {"name": "tinsmith"}, "user_details": {"email": ""}},
        }
    )


ROUTES = (web.get("/api/v1/auth/apikey/me", get_own_key),)
