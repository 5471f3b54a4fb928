// How far two workers are from each other, and what that costs.
//
// A place is a path from far to near, such as "east/rack7/host3"; a worker whose place no list has
// said is at its URL's host. What is in one place moves KV through memory; otherwise it goes
// through a network, and the further up two paths part, the more of it.
#pragma once

#include <string_view>

namespace baton::engine::router {

// 0 in the same place, 1 next door (only the last part differs), 2 a part further up, and so on; of
// paths that are not equally long as many as the longer one has behind where they part.
int distance(std::string_view a, std::string_view b);

// What moving a token's KV so far costs, in tokens that are computed: nothing in one place,
// `next_door`, and twice as much for each part further up, at most six times doubled.
double move_cost(int distance, double next_door);

// Whether `text` may be a place: up to 128 letters, digits, and . _ - in parts that are not empty.
bool is_place(std::string_view text);

}  // namespace baton::engine::router
