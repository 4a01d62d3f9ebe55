-- End the turn of a holder that is proved to be gone, or that an operator answers for.
-- ARGV: 1 base, 2 token, 3 the holder that the proof is about (JSON), 4 died | ended
-- returns 1, or 0 if that isn't the present turn, or its holder has meanwhile named other processes: nothing is changed
if not holds(ARGV[2]) or redis.call('HGET', base, 'holder') ~= ARGV[3] then
  return 0
end
finish(ARGV[4])
return 1
