// Commands as bytes: the kind, then its fields; lists begin with their length.
#include "engine/shard/commands.h"

#include <cstring>

#include "transport/base/wire.h"

namespace baton::engine::shard {
namespace {

template <typename T>
void put_list(std::string& out, const std::vector<T>& list) {
  base::put_number(out, static_cast<uint32_t>(list.size()));
  out.append(reinterpret_cast<const char*>(list.data()), list.size() * sizeof(T));
}

template <typename T>
std::vector<T> take_list(base::WireReader& reader) {
  const size_t count = reader.number<uint32_t>();
  const std::string_view bytes = reader.take(count * sizeof(T));
  std::vector<T> list(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(list.data(), bytes.data(), bytes.size());
  return list;
}

}  // namespace

void Command::encode(std::string& out) const {
  out.clear();
  base::put_number(out, static_cast<uint8_t>(kind));
  if (kind != CommandKind::kStep) return;
  base::put_number(out, static_cast<uint32_t>(chunks.size()));
  for (const Chunk& chunk : chunks) {
    put_list(out, chunk.tokens);
    base::put_number(out, chunk.position);
    put_list(out, chunk.blocks);
    base::put_number(out, static_cast<uint8_t>(chunk.wants_logits));
    base::put_number(out, static_cast<uint8_t>(chunk.wants_all_logits));
  }
}

absl::StatusOr<Command> Command::decode(std::string_view bytes) {
  base::WireReader reader(bytes);
  Command command;
  command.kind = static_cast<CommandKind>(reader.number<uint8_t>());
  bool known = command.kind == CommandKind::kStop || command.kind == CommandKind::kStep;
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
  }
  if (!known || !reader.finished()) {
    return absl::InvalidArgumentError("rank 0 sent a command that this version does not know");
  }
  return command;
}

}  // namespace baton::engine::shard
