-- Bodies for wrk: a forward over random float16 tensors, made once a thread. small.lua, medium.lua and large.lua call
-- attention(B, S, H, D); `done` prints one line that load.py reads.
local ffi = require 'ffi'
local alphabet = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/'

-- Base64 of `count` random float16 of magnitude 2^-5 to 2. Three bytes make four characters, six bytes (three numbers) eight.
local function random_base64(count)
    local bytes = count * 2
    local raw = ffi.new('uint8_t[?]', bytes + 3)
    for i = 0, count - 1 do
        local r = math.random(0, 0x1FFFF)                 -- a sign, six exponents in sixteenths, ten bits
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
    for p = 1, left do text[groups * 4 - p] = 61 end      -- '='; raw is zero past its end
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

function done(summary, latency, requests)
    local e = summary.errors
    io.write(string.format('RESULT {"requests":%d,"seconds":%.6f,"p50_ms":%.4f,"p99_ms":%.4f,"max_ms":%.4f,"bad_status":%d,"socket_errors":%d}\n',
        summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3,
        e.status, e.connect + e.read + e.write + e.timeout))
end
