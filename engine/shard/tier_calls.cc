// Calls and reports of KV tiers as bytes.
#include "engine/shard/tier_calls.h"

#include "absl/strings/str_cat.h"
#include "engine/shard/wire_lists.h"

namespace baton::engine::shard {

using kvtransfer::tiers::TierFound;
using kvtransfer::tiers::TierKey;
using kvtransfer::tiers::TierStats;

RankKeys::RankKeys(const ModelShard& shard)
    : keys_({.weights = "",
             .tokenizer = "",
             .dtype = "",
             .layout = "",
             .shard = absl::StrCat(shard.rank, "/", shard.ranks),
             .adapter = "",
             .salt = ""}) {}

TierKey RankKeys::of(const TierKey& block) const {
  return keys_.key({reinterpret_cast<const char*>(block.bytes.data()), block.bytes.size()});
}

std::vector<TierKey> RankKeys::of(std::span<const TierKey> blocks) const {
  std::vector<TierKey> own;
  own.reserve(blocks.size());
  for (const TierKey& block : blocks) own.push_back(of(block));
  return own;
}

void TierCall::encode(std::string& out) const {
  base::put_number(out, static_cast<uint8_t>(kind));
  base::put_number(out, id);
  put_list(out, keys);
  put_list(out, blocks);
  put_time(out, timeout);
}

TierCall TierCall::decode(base::WireReader& reader) {
  TierCall call;
  call.kind = static_cast<TierCallKind>(reader.number<uint8_t>());
  call.id = reader.number<uint64_t>();
  call.keys = take_list<TierKey>(reader);
  call.blocks = take_list<uint32_t>(reader);
  call.timeout = take_time(reader);
  const bool save = call.kind == TierCallKind::kSave, load = call.kind == TierCallKind::kLoad;
  const size_t least = save || load ? 1 : 0;
  const bool whole = call.kind >= TierCallKind::kFind && call.kind <= TierCallKind::kFlush &&
                     call.keys.size() >= least &&
                     call.blocks.size() == (least == 0 ? 0 : call.keys.size());
  if (!whole) reader.take(SIZE_MAX);  // fails: nobody calls so
  return call;
}

std::string TierReport::encode(const TierStats& stats, std::deque<TierEvent>& events) {
  std::string listed;
  std::string next;
  uint16_t count = 0;
  constexpr size_t kHead = 5 * sizeof(uint64_t) + sizeof(count) + 1;
  while (!events.empty()) {
    const TierEvent& event = events.front();
    next.clear();
    base::put_number(next, static_cast<uint8_t>(event.kind));
    base::put_number(next, event.id);
    if (event.kind == TierEventKind::kFound) {
      for (size_t number :
           {event.found.blocks, event.found.disk, event.found.peer, event.found.near}) {
        base::put_number(next, uint64_t{number});
      }
    } else if (event.kind == TierEventKind::kLoadFailed) {
      put_status(next, event.why);
    }
    if (kHead + listed.size() + next.size() > kBytes) break;
    listed += next;
    ++count;
    events.pop_front();
  }
  std::string out;
  for (uint64_t number :
       {stats.host_bytes, stats.dropped, stats.silences, stats.missed, stats.corrupt}) {
    base::put_number(out, number);
  }
  base::put_number(out, static_cast<uint8_t>(!events.empty()));
  base::put_number(out, count);
  out += listed;
  out.resize(kBytes);
  return out;
}

absl::StatusOr<TierReport> TierReport::decode(std::string_view bytes) {
  base::WireReader reader(bytes);
  TierReport report;
  for (uint64_t* number : {&report.stats.host_bytes, &report.stats.dropped, &report.stats.silences,
                           &report.stats.missed, &report.stats.corrupt}) {
    *number = reader.number<uint64_t>();
  }
  report.more = reader.number<uint8_t>() != 0;
  const auto count = reader.number<uint16_t>();
  bool known = bytes.size() == kBytes;
  for (uint16_t i = 0; i < count && !reader.failed(); ++i) {
    TierEvent& event = report.events.emplace_back();
    event.kind = static_cast<TierEventKind>(reader.number<uint8_t>());
    known &= event.kind >= TierEventKind::kFound && event.kind <= TierEventKind::kLoadQuiet;
    event.id = reader.number<uint64_t>();
    if (event.kind == TierEventKind::kFound) {
      TierFound& found = event.found;
      for (size_t* number : {&found.blocks, &found.disk, &found.peer, &found.near}) {
        *number = reader.number<uint64_t>();
      }
    } else if (event.kind == TierEventKind::kLoadFailed) {
      event.why = take_status(reader);
    }
  }
  if (known && !reader.failed()) return report;
  return absl::InternalError(
      "a rank sent a report of its KV tiers that this version does not know");
}

}  // namespace baton::engine::shard
