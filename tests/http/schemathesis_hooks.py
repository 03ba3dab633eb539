"""A check for schemathesis (SCHEMATHESIS_HOOKS, see test_operations.py). A problem document (the JSON of an error) must
have the status of its answer, and a code that the operation lists for that status (x-codes)."""
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
    """Keeps requests whose only fault is an unknown header, because HTTP lets a client send headers that the server
    does not know."""
    return not any(name.lower() == 'x-schemathesis-unknown-property' for name in case.headers or {})


@schemathesis.deserializer('application/x-safetensors')
def read_safetensors(context, response):
    """Reads an answer in safetensors, which in the schema is a string of bytes."""
    return response.content.decode('latin-1')
