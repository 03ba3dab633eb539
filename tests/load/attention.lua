-- Makes the bodies that wrk sends: a forward over random float16 tensors, made once per thread. small.lua, medium.lua
-- and large.lua call attention(B, S, H, D); own.lua sends a file. All scripts take these words after `--` on wrk's
-- command line:
--
--   token=SECRET   send Authorization: Bearer SECRET
--   sessions=N     send X-Session-Id: each thread has N ids of its own and uses them in turn
--   statuses=1     count the answers by status; this makes wrk slower, so measurements do without it
--
-- After wrk's own report, `done` prints one line for programs to read (load.py, tests/deploy/scaleout.py).
local ffi = require 'ffi'
ffi.cdef 'struct load_time { long s, us; }; int gettimeofday(struct load_time *, void *);'
local alphabet = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/'

-- ---- Bodies ----

-- Returns base64 of `count` random float16 with magnitudes from 2^-5 to 2.
local function random_base64(count)
    local bytes = count * 2
    local raw = ffi.new('uint8_t[?]', bytes + 3)
    for i = 0, count - 1 do
        local r = math.random(0, 0x1FFFF) -- random bits: a sign, one of six exponents, ten mantissa bits
        local exponent = 10 + math.floor(r / 2048) % 6
        raw[2 * i] = r % 256
        raw[2 * i + 1] = math.floor(r / 65536) * 128 + exponent * 4 + math.floor(r / 256) % 4
    end
    local groups = math.floor((bytes + 2) / 3)
    local text = ffi.new('uint8_t[?]', groups * 4)
    local code = ffi.new('uint8_t[64]', {string.byte(alphabet, 1, 64)})
    for g = 0, groups - 1 do
        local a, b, c = raw[3 * g], raw[3 * g + 1], raw[3 * g + 2]
        text[4 * g] = code[math.floor(a / 4)]
        text[4 * g + 1] = code[a % 4 * 16 + math.floor(b / 16)]
        text[4 * g + 2] = code[b % 16 * 4 + math.floor(c / 64)]
        text[4 * g + 3] = code[c % 64]
    end
    local left = groups * 3 - bytes
    for p = 1, left do text[groups * 4 - p] = 61 end      -- writes the '=' of the padding; raw is zero past its end
    return ffi.string(text, groups * 4)
end

function attention(B, S, H, D)
    math.randomseed(os.time() + tonumber(tostring({}):match('0x(%x+)'), 16) % 65536)
    local shape = string.format('"shape":[%d,%d,%d,%d],"dtype":"float16"', B, S, H, D)
    local parts = {}
    for _, name in ipairs {'q', 'k', 'v'} do
        parts[#parts + 1] = string.format('"%s":{%s,"data":"%s"}', name, shape, random_base64(B * S * H * D))
    end
    wrk.method = 'POST'
    wrk.path = '/v1/attention/forward'
    wrk.headers['Content-Type'] = 'application/json'
    wrk.body = '{' .. table.concat(parts, ',') .. ',"causal":true}'
end

-- ---- The words after `--` ----

-- Ends wrk at once with this message. After an error() in init, wrk would end only when its time is over.
function stop(why)
    io.stderr:write(why, '\n')
    os.exit(2)
end

local threads = {}
function setup(thread)
    threads[#threads + 1] = thread
    thread:set('thread_number', #threads)
end

-- this thread's counts of answers by status; `done` adds up those of all threads
statuses, first_bad_ms, last_bad_ms = {}, 0, 0

local function count_status(status)
    statuses[status] = (statuses[status] or 0) + 1
    if status >= 400 then
        local t = ffi.new('struct load_time')
        ffi.C.gettimeofday(t, nil)
        last_bad_ms = tonumber(t.s) * 1000 + math.floor(tonumber(t.us) / 1000)
        if first_bad_ms == 0 then first_bad_ms = last_bad_ms end
    end
end

local function by_turns(count)
    local made, turn = {}, 0
    for i = 1, count do
        wrk.headers['X-Session-Id'] = string.format('load-%d-%d', thread_number or 1, i)
        made[i] = wrk.format()
    end
    return function()
        turn = turn % count + 1
        return made[turn]
    end
end

local own_words = { body = true, path = true, type = true, accept = true, inference = true } -- own.lua's

function init(args)
    for _, word in ipairs(args) do
        local name, value = word:match('^(%a+)=(.*)$')
        if name == 'token' then wrk.headers['Authorization'] = 'Bearer ' .. value
        elseif name == 'sessions' then request = by_turns(tonumber(value))
        elseif name == 'statuses' then response = count_status
        elseif not own_words[name] then stop('unknown word: ' .. word) end
    end
end

-- ---- The end ----

function done(summary, latency, requests)
    local e, all, seen, first, last = summary.errors, {}, {}, 0, 0
    for _, thread in ipairs(threads) do
        for status, count in pairs(thread:get('statuses')) do all[status] = (all[status] or 0) + count end
        local a, b = thread:get('first_bad_ms'), thread:get('last_bad_ms')
        if a > 0 and (first == 0 or a < first) then first = a end
        if b > last then last = b end
    end
    for status, count in pairs(all) do seen[#seen + 1] = string.format('"%d":%d', status, count) end
    table.sort(seen)
    io.write(string.format('RESULT {"requests":%d,"seconds":%.6f,"p50_ms":%.4f,"p99_ms":%.4f,"max_ms":%.4f,"bad_status":%d,"socket_errors":%d,' ..
        '"connect_errors":%d,"read_errors":%d,"write_errors":%d,"timeouts":%d,"statuses":{%s},"first_bad_ms":%d,"last_bad_ms":%d}\n',
        summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3,
        e.status, e.connect + e.read + e.write + e.timeout, e.connect, e.read, e.write, e.timeout, table.concat(seen, ','), first, last))
end
