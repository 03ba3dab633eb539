-- wrk script: causal forward of float16 [1, 64, 4, 64], a body of about 131 KB.
--   wrk -t2 -c64 -d10s -s tests/load/small.lua http://127.0.0.1:8080
dofile((debug.getinfo(1, 'S').source:match('^@(.*/)') or './') .. 'attention.lua')
attention(1, 64, 4, 64)
