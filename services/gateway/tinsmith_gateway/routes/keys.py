"""The API key that a request presents: what it is, its end, and a token for it."""

from __future__ import annotations

from aiohttp import web

from tinsmith.errors import InvalidRequest, NotSupported, Unauthorized
from tinsmith.keys import revoked
from tinsmith_gateway import audit, bodies, responses
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.middleware import CALLER, OWN_KEY
from tinsmith_gateway.wire.results import JSON


async def get_own_key(request: web.Request) -> web.Response:
    """What is known of the key: its owner, who has no address here."""
    caller = request[CALLER]
    return responses.of_json(
        {
            "key_id": int(caller.owner[:12], 16),  # a number; 48 bits are exact in JSON
            "name": caller.name,
            "note": "",
            "details": {"org_details": {"name": "tinsmith"}, "user_details": {"email": ""}},
        }
    )


async def revoke_own_key(request: web.Request) -> web.Response:
    """Ends the key, at every gateway, with all tokens that were made for it."""
    gateway, caller = request.app[GATEWAY], request[CALLER]
    if gateway.keys.is_configured(caller):
        raise InvalidRequest(
            "X-API-Key: this key stands in the server's configuration and is not revoked from "
            "here; its operator removes it there (gateway.api_keys, gateway.api_key_file)"
        )
    keys = gateway.registry.api_keys
    # The watch will tell of it too, but the caller may come again before that.
    keys.apply(caller.key_digest, await keys.table.update(caller.key_digest, revoked))
    details = {"key_id": caller.key_digest[:12], "by": "owner"}
    await audit.record(gateway, caller.owner, "key_revoked", details, topic="keys")
    return responses.of_json({})


async def exchange_key(request: web.Request) -> web.Response:
    """A token for the key, good for some minutes."""
    tokens, caller = request.app[GATEWAY].tokens, request[CALLER]
    await bodies.read(request, JSON)
    if tokens is None:
        raise NotSupported(
            "this server gives out no tokens (gateway.exchange_keys is off); present the API key "
            "with every request, as clients do when client/config says so"
        )
    if caller.is_by_token:  # or whoever has stolen one could renew it for ever
        raise Unauthorized("X-API-Key: a token is not exchanged for another; present the API key")
    return responses.of_json({"jwt": tokens.issue(caller)})


ROUTES = (
    web.get(OWN_KEY, get_own_key),
    web.delete(OWN_KEY, revoke_own_key),
    web.post("/api/v1/auth/token", exchange_key),
)
