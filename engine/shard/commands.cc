// Reports: as many events as find room.
#include "engine/shard/commands.h"

#include <utility>

namespace baton::engine::shard {

void Report::take(std::deque<Event>& events, std::vector<Event>& list) {
  std::string bytes;
  base::FieldWriter wire(bytes);
  contents(wire, *this);
  for (; !events.empty(); events.pop_front()) {
    wire(events.front());
    if (bytes.size() > kBytes) break;
    list.push_back(std::move(events.front()));
  }
  more |= !events.empty();
}

}  // namespace baton::engine::shard
