// A stream of tokens as pieces of valid UTF-8.
#include "engine/tokenizer/pre_tokenizer.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine {

std::string StreamDecoder::push(int32_t id) {
  if (!tokenizer_->is_special(id)) pending_ += tokenizer_->token_bytes(id);
  std::string out;
  size_t at = 0;
  while (at < pending_.size()) {
    const Character c = decode_character(pending_, at);
    if (!c.valid) {
      // Cut off, or wrong? A lead byte with only right bytes behind it may still become whole.
      const uint8_t lead = static_cast<uint8_t>(pending_[at]);
      const size_t need = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
      bool hopeful = lead >= 0xc2 && lead <= 0xf4 && pending_.size() - at < need;
      for (size_t i = at + 1; i < pending_.size() && hopeful; ++i) {
        hopeful = (static_cast<uint8_t>(pending_[i]) & 0xc0) == 0x80;
      }
      if (hopeful) break;
      out += "\xef\xbf\xbd";
    } else {
      out.append(pending_, at, c.bytes);
    }
    at += c.bytes;
  }
  pending_.erase(0, at);
  return out;
}

std::string StreamDecoder::finish() {
  std::string out = pending_.empty() ? "" : "\xef\xbf\xbd";
  pending_.clear();
  return out;
}

}  // namespace baton::engine
