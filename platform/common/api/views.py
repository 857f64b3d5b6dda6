"""The base of every view of the API, for handlers that compute and for those that wait."""

import inspect
from typing import Any

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.views import APIView

from common.api.database import run_db
from common.api.parsers import JsonParser
from common.api.schema import ApiSchema


class ApiView(APIView):
    """A view whose handlers are plain functions and end soon."""

    parser_classes = (JsonParser,)
    metadata_class = None
    schema = ApiSchema()


class AsyncApiView(ApiView):
    """A view whose handlers are coroutines and may wait for minutes.

    Authentication and permissions run through `run_db`, so a request that waits in its
    handler holds no thread and no connection. Handlers must use `run_db` as well.
    """

    async def dispatch(  # type: ignore[override]
        self, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        """Do what DRF's own does, and await the handler."""
        self.args, self.kwargs = args, kwargs
        self.request = self.initialize_request(request, *args, **kwargs)
        self.headers = self.default_response_headers
        try:
            await run_db(self.initial, self.request, *args, **kwargs)
            response = self._handler(self.request)(self.request, *args, **kwargs)
            if inspect.isawaitable(response):
                response = await response
        except Exception as error:
            response = self.handle_exception(error)
        self.response = self.finalize_response(self.request, response, *args, **kwargs)
        return self.response

    def _handler(self, request: Request) -> Any:
        method = (request.method or "").lower()
        if method not in self.http_method_names:
            return self.http_method_not_allowed
        return getattr(self, method, self.http_method_not_allowed)
