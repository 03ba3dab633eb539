-- wrk script: sends the contents of a file to any path.
--   wrk -t2 -c16 -d10s -s tests/load/own.lua http://127.0.0.1:8080 -- body=request.json path=/v1/attention/backward
--   wrk -t2 -c16 -d10s -s tests/load/own.lua http://127.0.0.1:8080 -- body=request.safetensors \
--       type=application/x-safetensors
-- The default path is /v1/attention/forward, the default type application/json. accept=TYPE is the type that the answer
-- should have, inference=N the length of the JSON before KServe's binary tensors. attention.lua lists the other words.
dofile((debug.getinfo(1, 'S').source:match('^@(.*/)') or './') .. 'attention.lua')

local other_words = init
function init(args)
    local given = { path = '/v1/attention/forward', type = 'application/json' }
    for _, word in ipairs(args) do
        local name, value = word:match('^(%a+)=(.*)$')
        if name then given[name] = value end
    end
    local file, why = io.open(given.body or stop('say which file: -- body=FILE'), 'rb')
    if not file then stop(why) end
    wrk.method, wrk.path, wrk.body = 'POST', given.path, file:read('*a')
    wrk.headers['Content-Type'], wrk.headers['Accept'] = given.type, given.accept
    wrk.headers['Inference-Header-Content-Length'] = given.inference
    file:close()
    other_words(args)
end
