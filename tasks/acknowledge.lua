-- Note that a client has these results for good: they are kept only as long as a reply may still be under way.
-- ARGV: 1 tenant, 2 how long they are kept now, then request ids
for i = 3, #ARGV do
  local future = K.future(ARGV[1], ARGV[i])
  local known = redis.call('HMGET', future, 'state', 'result')
  if known[1] and known[1] ~= 'pending' then
    redis.call('HSETNX', future, 'delivered', clock())
    redis.call('PEXPIRE', future, math.floor(ARGV[2] * 1000))
    if known[2] and string.sub(known[2], 1, 1) == '@' then
      keep_file(known[2], clock() + ARGV[2])
    end
  end
end
return 1
