// The groups, handles and communicators of callbacks that there are. What a caller passes is looked up before it is
// followed: it may have been destroyed, be of the other kind, or never have been one. An address that a new object has
// got is that object.
#pragma once

#include <functional>

namespace ep::c {

enum class ObjectKind { kGroup, kHandle, kComm };

// Any threads may call them, of a fork too.
void add_live(const void* object, ObjectKind kind);
bool is_live(const void* object, ObjectKind kind);
void require_live(const void* object, ObjectKind kind);  // refuses what is not there, or of the other kind
void remove_live(const void* object, ObjectKind kind);   // the same
// The same, and calls `use` while the object cannot be removed.
void with_live(const void* object, ObjectKind kind, const std::function<void()>& use);

}  // namespace ep::c
