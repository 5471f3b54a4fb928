// A prepared program: a rank's steps, with what each must wait for before it overwrites data that
// an earlier send may still be reading.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/schedules/schedule.h"

namespace baton::collectives::executor {

struct PreparedProgram {
  std::vector<schedules::Step> steps;
  // The hazards of step s: sends (indices of steps) hazards[first_hazard[s] .. first_hazard[s +
  // 1]).
  std::vector<uint32_t> first_hazard;
  std::vector<uint32_t> hazards;
  std::vector<uint32_t> sends;  // all sends, in order
  // Over a link whose messages wait for grants: the receives of which the first grants are for,
  // each with its place among the messages of its peer (from 1), and for each receive the one to
  // grant when it is done, kMessagesAhead messages of its peer's later (kNoStep: there is none). So
  // each peer always has the grants that a schedule counts on.
  static constexpr uint32_t kNoStep = UINT32_MAX;
  std::vector<std::pair<uint32_t, uint32_t>> first_grants;
  std::vector<uint32_t> next_grant;
  // The first step from which on the place of receive s is written by nothing but its message,
  // apart from sends that still read it (its hazards). kNoStep: the step reads what it overwrites.
  std::vector<uint32_t> free_from;
  // Step s writes what no step reads before the call ends, so it need not stay in the caches.
  std::vector<bool> final_write;
  uint32_t scratch_parts = 0;
  uint32_t max_message_parts = 1;
};

// `in_place`: input and output are the same memory (for reduce_scatter and all_gather: the rank's
// own part of the larger buffer is the smaller buffer). `rank` is whose program it is.
PreparedProgram prepare(schedules::Program program, Collective collective, uint32_t rank,
                        bool in_place);

}  // namespace baton::collectives::executor
