"""A check of schemathesis (SCHEMATHESIS_HOOKS, see test_operations.py): a problem document has its own status, and a
code that the operation lists for that status (x-codes)."""
import schemathesis


@schemathesis.check
def code_is_listed(context, response, case):
    if not response.headers.get('content-type', [''])[0].startswith('application/problem+json') or case.method.upper() == 'HEAD':
        return
    problem = response.json()
    listed = case.operation.definition.raw['responses'].get(str(response.status_code), {}).get('x-codes', [])
    assert problem['status'] == response.status_code and problem['code'] in listed, f'{problem["code"]} is not one of {listed}'


@schemathesis.hook
def filter_case(context, case):
    """HTTP lets a client send headers that the server does not know, so an unknown header does not make a request
    wrong."""
    return not any(name.lower() == 'x-schemathesis-unknown-property' for name in case.headers or {})


@schemathesis.deserializer('application/x-safetensors')
def read_safetensors(context, response):
    """In the schema a safetensors file is a string of bytes."""
    return response.content.decode('latin-1')
