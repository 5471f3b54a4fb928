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
  if (!whole) reader.take(SIZE_MAX);  // fails: no caller calls so
  return call;
}

std::string TierReport::encode(const TierStats& stats, std::deque<TierEvent>& events) {
  return put_report(
      kBytes, {stats.host_bytes, stats.dropped, stats.silences, stats.missed, stats.corrupt},
      events, [](std::string& out, const TierEvent& event) {
        if (event.kind == TierEventKind::kFound) {
          const TierFound& found = event.found;
          for (const size_t number : {found.blocks, found.disk, found.peer, found.near}) {
            base::put_number(out, uint64_t{number});
          }
        } else if (event.kind == TierEventKind::kLoadFailed) {
          put_status(out, event.why);
        }
      });
}

absl::StatusOr<TierReport> TierReport::decode(std::string_view bytes) {
  TierReport report;
  TierStats& stats = report.stats;
  const bool known = take_report(
      bytes, kBytes,
      {&stats.host_bytes, &stats.dropped, &stats.silences, &stats.missed, &stats.corrupt},
      TierEventKind::kFound, TierEventKind::kLoadQuiet, &report.events, &report.more,
      [](base::WireReader& reader, TierEvent& event) {
        if (event.kind == TierEventKind::kFound) {
          TierFound& found = event.found;
          for (size_t* number : {&found.blocks, &found.disk, &found.peer, &found.near}) {
            *number = reader.number<uint64_t>();
          }
        } else if (event.kind == TierEventKind::kLoadFailed) {
          event.why = take_status(reader);
        }
      });
  if (known) return report;
  return absl::InternalError(
      "a rank sent a report of its KV tiers that this version does not know");
}

}  // namespace baton::engine::shard
