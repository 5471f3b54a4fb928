// Commands as bytes: the kind, then its fields; lists begin with their length.
#include "engine/shard/commands.h"

#include "engine/shard/wire_lists.h"

namespace baton::engine::shard {

void Command::encode(std::string& out) const {
  out.clear();
  base::put_number(out, static_cast<uint8_t>(kind));
  if (kind == CommandKind::kStop) return;
  base::put_number(out, static_cast<uint32_t>(calls.size()));
  for (const KvCall& call : calls) call.encode(out);
  if (kind == CommandKind::kStep) encode_step(out);
  base::put_number(out, static_cast<uint32_t>(tier_calls.size()));
  for (const TierCall& call : tier_calls) call.encode(out);
}

void Command::encode_step(std::string& out) const {
  base::put_number(out, static_cast<uint32_t>(chunks.size()));
  for (const Chunk& chunk : chunks) {
    put_list(out, chunk.tokens);
    base::put_number(out, chunk.position);
    put_list(out, chunk.blocks);
    base::put_number(out, static_cast<uint8_t>(chunk.wants_logits));
    base::put_number(out, static_cast<uint8_t>(chunk.wants_all_logits));
  }
  base::put_number(out, static_cast<uint32_t>(sends.size()));
  for (const Send& send : sends) {
    base::put_number(out, send.job);
    base::put_number(out, send.first_block);
    put_list(out, send.blocks);
  }
}

absl::StatusOr<Command> Command::decode(std::string_view bytes) {
  base::WireReader reader(bytes);
  Command command;
  command.kind = static_cast<CommandKind>(reader.number<uint8_t>());
  const bool known = command.kind >= CommandKind::kStop && command.kind <= CommandKind::kSync;
  if (known && command.kind != CommandKind::kStop) {
    const auto count = reader.number<uint32_t>();
    for (uint32_t i = 0; i < count && !reader.failed(); ++i) {
      command.calls.push_back(KvCall::decode(reader));
    }
  }
  if (command.kind == CommandKind::kStep) {
    const auto count = reader.number<uint32_t>();
    for (uint32_t i = 0; i < count && !reader.failed(); ++i) {
      Chunk& chunk = command.chunks.emplace_back();
      chunk.tokens = take_list<int32_t>(reader);
      chunk.position = reader.number<int32_t>();
      chunk.blocks = take_list<uint32_t>(reader);
      chunk.wants_logits = reader.number<uint8_t>() != 0;
      chunk.wants_all_logits = reader.number<uint8_t>() != 0;
    }
    const auto sends = reader.number<uint32_t>();
    for (uint32_t i = 0; i < sends && !reader.failed(); ++i) {
      Send& send = command.sends.emplace_back();
      send.job = reader.number<uint64_t>();
      send.first_block = reader.number<uint32_t>();
      send.blocks = take_list<uint32_t>(reader);
    }
  }
  if (known && command.kind != CommandKind::kStop) {
    const auto count = reader.number<uint32_t>();
    for (uint32_t i = 0; i < count && !reader.failed(); ++i) {
      command.tier_calls.push_back(TierCall::decode(reader));
    }
  }
  if (!known || !reader.finished()) {
    return absl::InvalidArgumentError("rank 0 sent a command that this version does not know");
  }
  return command;
}

absl::StatusOr<Report> Report::decode(std::string_view bytes) {
  absl::StatusOr<KvReport> kv = KvReport::decode(bytes.substr(0, KvReport::kBytes));
  if (!kv.ok()) return kv.status();
  bytes.remove_prefix(KvReport::kBytes);
  absl::StatusOr<TierReport> tiers = TierReport::decode(bytes);
  if (!tiers.ok()) return tiers.status();
  return Report{*std::move(kv), *std::move(tiers)};
}

}  // namespace baton::engine::shard
