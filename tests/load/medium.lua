-- wrk script: causal forward of float16 [1, 1024, 8, 64], a body of about 4.2 MB.
--   wrk -t2 -c64 -d10s --timeout 60s -s tests/load/medium.lua http://127.0.0.1:8080
dofile((debug.getinfo(1, 'S').source:match('^@(.*/)') or './') .. 'attention.lua')
attention(1, 1024, 8, 64)
