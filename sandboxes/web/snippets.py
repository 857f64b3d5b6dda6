"""What the console offers to copy: ways to reach a sandbox from a program."""

from django.conf import settings

from accounts.models import Team
from sandboxes.models import Sandbox, Template


def first_steps(team: Team) -> dict[str, str]:
    """Return the ways to a first sandbox that need no console."""
    names = Template.objects.visible_to(team).exclude(generation=None)
    name = names.order_by("template_id").values_list("template_id", flat=True).first()
    return {"sdk": _sdk_claim(name or "default"), "curl": _curl_claim(name or "default")}


def snippets_for(sandbox: Sandbox) -> dict[str, str]:
    """Return how a program runs a command in this sandbox."""
    return {
        "sdk": (
            f"{_CLIENT}\n"
            f'sandbox = client.sandbox("{sandbox.id}")\n'
            'print(sandbox.cmd("uname -a").output_raw)'
        ),
        "curl": (
            f'curl -H "Authorization: Bearer $SANDKEEP_KEY" \\\n'
            f"  {settings.PUBLIC_URL}/api/v1/sandboxes/{sandbox.id}"
        ),
    }


_CLIENT = (
    "from sandbox0 import Client\n\n"
    'client = Client(token="s0_…",  # made on the Keys page\n'
    f'                base_url="{settings.PUBLIC_URL}")'
)


def _sdk_claim(template_id: str) -> str:
    return (
        "# pip install sandbox0\n"
        f"{_CLIENT}\n"
        f'sandbox = client.sandboxes.claim("{template_id}")\n'
        'print(sandbox.cmd("echo hello").output_raw)\n'
        "client.sandboxes.pause(sandbox.id)"
    )


def _curl_claim(template_id: str) -> str:
    return (
        f"curl {settings.PUBLIC_URL}/api/v1/sandboxes \\\n"
        '  -H "Authorization: Bearer $SANDKEEP_KEY" \\\n'
        '  -H "Content-Type: application/json" \\\n'
        f"""  -d '{{"template": "{template_id}"}}'"""
    )
