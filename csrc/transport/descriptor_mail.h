// Descriptors of open files for other processes of the machine, such as memory of a GPU, which cannot be opened by
// name.
#pragma once

#include <vector>

#include "transport/file.h"
#include "transport/process.h"

namespace ep {

class DescriptorMail {
 public:
  struct Address {
    Token name;    // of the socket, which everybody on the machine sees
    Token secret;  // that whoever knows the address has from its owner
  };

  DescriptorMail();
  const Address& address() const { return address_; }
  // Sends `fd` to each of the others, and returns what each of them has sent. Those call it with this address. `ranks`:
  // theirs, for errors.
  std::vector<File> exchange(int fd, const std::vector<Address>& others, const std::vector<int>& ranks, double seconds);

 private:
  bool send(int fd, const Token& to, int rank) const;
  bool receive(const std::vector<Address>& others, std::vector<File>& received) const;

  Address address_{random_token(), random_token()};
  File socket_;
};

}  // namespace ep
