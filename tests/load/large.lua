-- wrk script: causal forward of float16 [1, 4096, 16, 128], a body of about 67 MB.
--   wrk -t2 -c8 -d10s --timeout 60s -s tests/load/large.lua http://127.0.0.1:8080
dofile((debug.getinfo(1, 'S').source:match('^@(.*/)') or './') .. 'attention.lua')
attention(1, 4096, 16, 128)
